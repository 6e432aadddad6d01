"""A forked child of a rank with a GPU: CUDA is closed to it, and weft says so in words of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from faults.forked import in_child, refusal
from faults.ops import OPS
from ranks import on_ranks
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced

pytestmark = pytest.mark.gpu
CULPRIT = 1


def with_work_of_their_own() -> dict[str, Callable[[], object]]:
    """Calls that pad or gather on the GPU before their op."""
    x, ids, weights = torch.randn(3, 8), torch.zeros(3, 1, dtype=torch.int32), torch.ones(3, 1)
    handle = fused_ops.MoeHandle(ids.new_zeros(8, 1), ids.new_zeros(3), ids.new_zeros(8))
    args: Any = x, torch.randn(4, 8), torch.zeros(6, dtype=torch.int64)
    return {
        "moe_dispatch padded": lambda: fused_ops.moe_dispatch(x, ids, 2, max_tokens=4),
        "moe_combine padded": lambda: fused_ops.moe_combine(x, handle, weights),
        "fused_linear_cross_entropy gathered": lambda: fused_ops.fused_linear_cross_entropy(
            *args, sequence_dim=0
        ),
        "fused_linear_log_probs gathered": lambda: fused_ops.fused_linear_log_probs(*args, sequence_dim=0),
    }


@pytest.mark.parametrize("checked", [False, True])
@on_ranks(2, device="cuda", fresh=True)
def test_a_child_is_refused_and_the_parent_goes_on(rank: int, world_size: int, checked: bool) -> None:
    peers = symm_mem.rendezvous(symm_mem.empty(64))
    with forced("fused"):
        # In place x is filled anew by the case: CUDA would refuse that, not weft.
        cases = {name: of(rank, world_size, 0, 64, None, 0) for name, of in OPS.items()}
        short = {name: case for name, case in cases.items() if name != "one_shot_all_reduce_"}

        def right() -> None:
            for name, case in cases.items():
                for _ in range(3):  # the slow path, then the fast one
                    assert torch.equal(case.call(), case.want()), name
                    assert fused_ops.last_plan().algorithm != "unfused", fused_ops.last_plan()
            peers.barrier()
            torch.cuda.synchronize()
            symm_mem.check()

        right()
        symm_mem.set_checked(checked)
        if rank == CULPRIT:
            calls: dict[str, Any] = {name: case.call for name, case in short.items()}
            calls |= {"barrier": peers.barrier, "empty": lambda: symm_mem.empty(3), "check": symm_mem.check}
            calls |= {"reset": symm_mem.reset, "put": lambda: peers.put(0), "wait": lambda: peers.wait(0)}
            calls |= with_work_of_their_own()
            for name, error in in_child(
                lambda: {n: refusal(call) for n, call in calls.items()}, "exit"
            ).items():
                found = error and (error["kind"], error.get("op"))
                assert found == ("ForkedProcess", name.split()[0]), (name, error)
        right()
        symm_mem.set_checked(False)
        symm_mem.reset()
        right()
