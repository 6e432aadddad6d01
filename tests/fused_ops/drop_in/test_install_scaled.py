"""``weft.install()`` and torch's fp8 ops, between CPU ranks, beside what torch says of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import weft
from opcommon import check, gather, poison, world
from ranks import on_ranks
from scaled_operands import ROUNDED, left, right
from torch.utils._pytree import tree_map_only
from weft.fused_ops import last_plan

AG, RS = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
gather_op, scatter_op = getattr(torch.ops.symm_mem, AG), getattr(torch.ops.symm_mem, RS)
BF16 = torch.bfloat16


def taken() -> dict[tuple[str, str, str], int]:
    return {(t.op, t.by, t.why): t.count for t in weft.drop_in.installed_calls(clear=True)}


def on_meta(op: Any, args: tuple[Any, ...]) -> Any:
    """What torch's own makes of fake tensors: gloo, for real ones, takes no fp8."""
    with torch._subclasses.FakeTensorMode() as mode:
        return op(*tree_map_only(torch.Tensor, mode.from_tensor, args))


@on_ranks(2)
def test_torchs_scaled_ops_on_weft(rank: int, size: int) -> None:
    weft.install()
    try:
        weft.drop_in.installed_calls(clear=True)
        name = world().group_name
        for kind in ("tensor", "rows"):
            for dim in (0, 1):
                a, b = left(kind, 3, 4, 32), right(kind, 32, 48)
                b_scale = b.scale.reshape(()) if kind == "tensor" else b.scale
                args = (
                    a.numbers,
                    [b.numbers],
                    a.scale,
                    [b_scale],
                    dim,
                    name,
                    [None],
                    [None],
                    [BF16],
                    [False],
                )
                poison(rank)
                A, (y,) = gather_op(*args)
                assert last_plan().algorithm == "host"
                theirs_A, (theirs,) = on_meta(gather_op, args)
                assert torch.equal(A.float().double(), torch.cat(gather(a.numbers.float()), dim))
                assert (A.shape, A.stride(), A.dtype) == (theirs_A.shape, theirs_A.stride(), theirs_A.dtype)
                assert (y.shape, y.stride(), y.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
                check("y", y, torch.cat(gather(a.meant), dim) @ b.meant, ROUNDED[BF16])
                a = left(kind, 2 * size, 3 * size, 32)
                shape = [2 * size, 3 * size, 48]
                given = a.numbers, b.numbers, a.scale, b_scale, "avg", dim, dim, name, shape
                z = scatter_op(*given, None, None, BF16)
                parts = [p.chunk(size, dim)[rank] / size for p in gather(a.meant @ b.meant)]
                check("z", z, sum(parts), ROUNDED[BF16], parts)
                theirs = on_meta(scatter_op, (*given, None, None, BF16))
                assert (z.shape, z.dtype) == (theirs.shape, theirs.dtype)
        assert taken() == {(AG, "weft", ""): 4, (RS, "weft", ""): 4}
        args = (a.numbers, [b.numbers], a.scale, [b_scale], 0, name, [None], [None], [None], [False])
        with pytest.raises(RuntimeError, match="Invalid scalar type"):  # gloo's, of fp8
            gather_op(*args)
        assert taken() == {(AG, "torch", "out_dtypes: is None, for which torch's results are fp8"): 1}
        with pytest.raises(ValueError, match="Invalid gather_dim"):
            gather_op(*args[:4], 7, name, [None], [None], [BF16], [False])
        assert taken() == {(AG, "torch", "torch refuses it"): 1}

        def compiled(x: torch.Tensor) -> torch.Tensor:
            return gather_op(x, *args[1:8], [BF16], [False])[1][0].float() * 2

        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(compiled)(a.numbers), compiled(a.numbers))
        assert taken() == {(AG, "weft", ""): 2}
    finally:
        weft.drop_in.uninstall()
