"""Nothing of weft keeps a destroyed group, or its store: rank 0's daemon would go on listening at its port. Nor the
operands of a call that has failed."""

from __future__ import annotations

import gc
import socket
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from op_table import op_calls
from ranks import run_ranks
from torch import Tensor
from torch._inductor import config as inductor_config
from torch.distributed.distributed_c10d import _get_process_group_store
from weft import fused_ops, symm_mem
from weft.fused_ops.ops import op as op_module

SIZE = 2
_kept: list[Any] = []  # what a program keeps beyond its groups' end


def every_op() -> None:
    x, w = torch.ones(4, 8), torch.ones(8, 4)
    group = dist.group.WORLD
    fused_ops.fused_all_gather_matmul(x, [w], 0, group)
    fused_ops.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
    fused_ops.fused_matmul_all_reduce(x, w, "sum", group)
    fused_ops.fused_all_reduce_rms_norm(x, x, torch.ones(8), 1e-5, group)
    fused_ops.fused_all_reduce_rms_norm_quant(x, x, torch.ones(8), 1e-5, group)
    fused_ops.fused_all_reduce_layer_norm(x, None, None, torch.ones(8), 1e-5, group)
    assert (fused_ops.one_shot_all_reduce(x, "sum", group) == SIZE).all()


def tensors_that_stay() -> None:
    tensor = symm_mem.empty(5)
    peers = symm_mem.rendezvous(tensor)
    tensor.fill_(peers.rank)
    peers.barrier()
    _kept.append((tensor, peers))


def a_graph_of_the_pass() -> None:
    # By name: Dynamo keeps a ProcessGroup that it has traced.
    name, c10d = dist.group.WORLD.group_name, torch.ops._c10d_functional

    def layer(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, SIZE, name)) @ w

    fusion = fused_ops.FusionPass(fuse="always")
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        compiled = torch.compile(layer, options=fusion.options)
        assert (compiled(torch.ones(3, 8), torch.ones(8, 4)) == 8).all()
    assert fusion.report().fused == 1 and fusion.report().questions.fused == 1
    _kept.append(compiled)


def groups_of_its_own() -> None:
    groups = [dist.new_group([0, 1]) for _ in range(2)]
    for group in groups:
        fused_ops.one_shot_all_reduce(torch.ones(3), "sum", group)
    symm_mem.reset(groups[0])


def a_call_that_is_compared() -> None:
    symm_mem.set_checked(True)
    try:
        fused_ops.one_shot_all_reduce(torch.ones(3), "sum", dist.group.WORLD)
    finally:
        symm_mem.set_checked(False)


USES = [
    every_op,
    tensors_that_stay,
    a_graph_of_the_pass,
    groups_of_its_own,
    a_call_that_is_compared,
    every_op,
]


def listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"rank 0 has not come to {path.name} in 60 s"
        time.sleep(0.01)


def again_and_again(rank: int, size: int, port: int, uses: list[Callable[[], None]], folder: Path) -> None:
    dist.destroy_process_group()
    for i, use in enumerate(uses):
        at = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=at, rank=rank, world_size=size)
        use()
        dist.barrier()
        groups = [weakref.ref(group) for group in list(dist.distributed_c10d._world.pg_map)]
        stores = [weakref.ref(_get_process_group_store(group())) for group in groups]
        dist.destroy_process_group()
        gc.collect()
        name = use.__name__
        assert all(ref() is None for ref in [*groups, *stores]), f"{name}: {groups} {stores}"
        assert rank or not listens(port), name
        # A rank that came before rank 0 has closed its store would be taken in by that store, and lose it.
        ended = folder / str(i)
        ended.touch() if rank == 0 else wait_for(ended)
    for tensor, peers in (kept for kept in _kept if isinstance(kept, tuple)):
        assert (tensor == rank).all() and (peers.tensors[1 - rank] == 1 - rank).all()


def test_a_group_is_made_anew_at_the_same_port(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks(again_and_again, SIZE, port, USES, tmp_path, fresh=True, timeout=100)


def failing(rank: int, world_size: int, op: str) -> None:
    """A call that fails before it has come to its heap keeps no operand."""
    call = op_calls()[op]
    operands = [weakref.ref(t) for t in call.arguments.values() if isinstance(t, Tensor)]
    gc.freeze()  # older objects are many
    try:
        with (
            mock.patch.object(op_module, "heap_or_reason", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            call(*call.tensors)
        del call
        gc.collect()
    finally:
        gc.unfreeze()
    assert operands and all(ref() is None for ref in operands)


@pytest.mark.parametrize("op", op_calls())
def test_a_call_that_fails_keeps_no_operand(op: str) -> None:
    run_ranks(failing, 2, op)
