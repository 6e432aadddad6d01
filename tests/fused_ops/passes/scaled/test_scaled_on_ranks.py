"""fp8 layers under tensor parallelism, as torchao's float8 training and an inference engine write them, on CPU ranks.

Through torch.compile, two of them with Inductor's code: against float64 of the dequantised operands, and the program
as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compiled import program
from graphs import gather, scatter
from ranks import run_ranks
from scaled_graphs import AGS, BF16, E5M2, SRS, all_reduce, by_rows, by_scale, scale_of, times, whole_amax
from torch import Tensor
from torch_versions import needs_row_wise_products

WORLD = 2
K, N, M = 64, 48, 20  # of the whole; M rows
Mm = Callable[..., Tensor]


def meant(q: Tensor, w: Tensor, s: Tensor, ws: Tensor, **more: Any) -> Tensor:
    """The product of what ``times`` multiplies, in float64, rounded once."""
    return ((q.double() * s.double()) @ (w.double().t() * ws.double())).to(more.get("out_dtype", BF16))


def dynamic(x: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> tuple[Tensor, Tensor]:
    """Cast with the maximum over all ranks, as torchao's of a DTensor."""
    scale = scale_of(all_reduce(whole_amax(x)), dtype)
    return by_scale(x, scale, dtype), scale.reciprocal()


def gathered_fp8(q: Tensor) -> Tensor:
    """As it is in the graph, which is what NCCL takes. gloo, run op by op, knows no fp8: there it goes as bytes."""
    return gather(q) if torch.compiler.is_compiling() else gather(q.view(torch.uint8)).view(q.dtype)


def column_wise(mm: Mm, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Float8ColwiseParallel, tensor-wise scales: x [M / W, K] and w [N / W, K]; then the backward of g [M, N / W]."""
    (q, s), (wq, ws) = dynamic(x), dynamic(w)
    q = gathered_fp8(q)
    y = mm(q, wq, s, ws)
    gq, gs = dynamic(g, E5M2)
    whole = mm(gq, wq.t().contiguous(), gs, ws, use_fast_accum=False)
    grad_w = mm(gq.t().contiguous(), q.t().contiguous(), gs, s, use_fast_accum=False)
    return y, scatter(whole), grad_w


def row_wise(mm: Mm, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """Float8RowwiseParallel, tensor-wise scales: x [M, K / W] and w [N, K / W]; then the backward of g [M / W, N]."""
    (q, s), (wq, ws) = dynamic(x), dynamic(w)
    y = scatter(mm(q, wq, s, ws))
    gq, gs = dynamic(g, E5M2)
    gq = gathered_fp8(gq)
    grad_x = mm(gq, wq.t().contiguous(), gs, ws, use_fast_accum=False)
    grad_w = mm(gq.t().contiguous(), q.t().contiguous(), gs, s, use_fast_accum=False)
    return y, grad_x, grad_w


def by_rows_of_columns(mm: Mm, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A column-parallel layer with row-wise scales, which gathers bf16; the weight has no gradient."""
    wq, ws = by_rows(w)
    q, s = by_rows(gather(x))
    y = mm(q, wq, s, ws.t())
    (gq, gs), (back, back_s) = by_rows(g), by_rows(w.t().contiguous())
    return y, scatter(mm(gq, back, gs, back_s.t()))


def by_rows_with_gradients(mm: Mm, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """The same with the gradient of the weight, for which bf16 is gathered: it is scaled by columns there."""
    wq, ws = by_rows(w)
    whole = gather(x)
    q, s = by_rows(whole)
    y = mm(q, wq, s, ws.t())
    (gq, gs), (back, back_s) = by_rows(g), by_rows(w.t().contiguous())
    (g_t, g_ts), (x_t, x_ts) = by_rows(g.t().contiguous()), by_rows(whole.t().contiguous())
    return y, scatter(mm(gq, back, gs, back_s.t())), mm(g_t, x_t, g_ts, x_ts.t())


def by_rows_of_rows(mm: Mm, x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    """A row-parallel layer with row-wise scales."""
    (q, s), (wq, ws) = by_rows(x), by_rows(w)
    y = scatter(mm(q, wq, s, ws.t()))
    (gq, gs), (back, back_s) = by_rows(gather(g)), by_rows(w.t().contiguous())
    return y, mm(gq, back, gs, back_s.t())


def static(mm: Mm, x: Tensor, w: Tensor, v: Tensor, scales: Tensor) -> tuple[Tensor, ...]:
    """Two layers of an inference engine, with scales that were measured before: x [M / W, K]."""
    s, ws, hs, vs = scales.unbind()
    h = mm(by_scale(gather(x), s.reciprocal()), w, s, ws).relu()
    return (scatter(mm(by_scale(h, hs.reciprocal()), v, hs, vs)),)


def operands(rank: int, name: str) -> tuple[Tensor, ...]:
    rows, columns = M // WORLD, N // WORLD
    if name == "static":
        fp8 = torch.float8_e4m3fn
        x, w, v = torch.randn(rows, K).to(BF16), torch.randn(32, K).to(fp8), torch.randn(N, 32).to(fp8)
        return x, w, v, torch.tensor([0.01, 0.5, 0.25, 0.125])
    if name in ("row_wise", "by_rows_of_rows"):
        shapes = (M, K // WORLD), (N, K // WORLD), (rows, N)
    else:
        shapes = (rows, K), (columns * 2, K), (M, columns * 2)
    return tuple(torch.randn(*shape).to(BF16) for shape in shapes)


# And into what their collectives are fused; None where none is.
PROGRAMS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], list[str | None]]] = {
    "column_wise": (column_wise, [AGS, SRS]),
    "row_wise": (row_wise, [SRS, AGS]),
    "by_rows_of_columns": (by_rows_of_columns, [AGS, SRS]),
    "by_rows_with_gradients": (by_rows_with_gradients, [None, SRS]),
    "by_rows_of_rows": (by_rows_of_rows, [SRS, AGS]),
    "static": (static, [AGS, SRS]),
}


def off(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def run_program(rank: int, world: int, name: str) -> list[tuple[str, str | None, str]]:
    from weft.fused_ops import last_plan

    torch.manual_seed(rank + 10)
    fn, _ = PROGRAMS[name]
    given = operands(rank, name)
    with torch.no_grad(), program(codegen=name in ("column_wise", "static")) as compiled:
        got = compiled.compile(lambda *args: fn(times, *args))(*given)
        plan = last_plan()
        plain = fn(times, *given)
        exact = fn(meant, *given)
    assert plan.algorithm == "host", plan
    for i, (mine, theirs, want) in enumerate(zip(got, plain, exact, strict=True)):
        assert (mine.shape, mine.dtype) == (theirs.shape, theirs.dtype)
        # Both round each rank's product and their sum, with a sum of float32 before: twice 2**-8 relative at most, and
        # where `meant` rounds an intermediate to the other side of an fp8 step, that of one operand in `static`.
        bound = 2**-6 if name == "static" else 2**-7
        assert off(mine, want) <= bound, (name, i, off(mine, want))
        assert off(mine, theirs) <= bound, (name, i, off(mine, theirs))
    dist.barrier()
    return [(e.collective, e.fused_into, e.reason) for e in compiled.fusion.report().entries]


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=needs_row_wise_products) if n.startswith("by_rows") else n for n in PROGRAMS],
)
def test_a_program(name: str) -> None:
    first, second = run_ranks(run_program, WORLD, name)
    assert first == second, "the ranks fused differently"
    entries = [e for e in first if e[0] != "all_reduce"]
    assert [fused for _, fused, _ in entries] == PROGRAMS[name][1], entries
    for _, fused, reason in entries:
        assert fused is not None or "is also used by" in reason
