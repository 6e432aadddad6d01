"""Scaled matmuls on GPUs: every kernel beside torch's, against float64 of what the operands stand for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from opcommon import gather, graph_of, poison, world
from ranks import on_ranks, run_row
from scaled_operands import E4M3, E5M2, KINDS, Scaled, left, right
from weft.fused_ops import fused_all_gather_scaled_matmul, fused_scaled_matmul_reduce_scatter, last_plan
from weft.fused_ops.dispatch.plan import forced

pytestmark = pytest.mark.gpu
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
# Of a shard or a part, K, and columns of B: whole tiles, cut ones, and little enough for one shot.
SIZES = ((256, 1024, 512), (300, 1040, 400), (2048, 4096, 3072), (5, 64, 16))
# Operands and result.
TYPES = ((E4M3, E4M3, BF16), (E5M2, E4M3, F16), (E4M3, E5M2, BF16), (E4M3, E4M3, F32))


def error(y: torch.Tensor, want: torch.Tensor) -> float:
    return float((y.double() - want).norm() / want.norm())


def no_further(what: str, y: torch.Tensor, torchs: torch.Tensor, want: torch.Tensor) -> None:
    """The tensor cores keep what they keep of a sum, in whatever order: so much more than torch's error."""
    mine, of_torch = error(y, want), error(torchs, want)
    assert mine <= 1.1 * of_torch + 2e-4, f"{what}: {mine:.3g}, torch's {of_torch:.3g}"


def gathers_on_gpus(
    rank: int, size: int, kind: str, fast: bool, sizes: tuple[int, int, int], types: tuple[torch.dtype, ...]
) -> None:
    (m, k, n), (of_a, of_b, out) = sizes, types
    a, bs = left(kind, m, k, dtype=of_a), [right(kind, k, c, dtype=of_b) for c in (n, 48)]
    bias = None if out == F32 else torch.randn(48, dtype=out)

    def call(return_A: bool = False) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        return fused_all_gather_scaled_matmul(
            *(a.numbers, [b.numbers for b in bs], a.scale, [b.scale for b in bs], 0, world(), [None, bias]),
            *(None, [out] * 2, [fast] * 2),
            return_A=return_A,
        )

    poison(rank)
    with forced("fused"):
        _, ys = call()
        assert last_plan().algorithm in ("push", "one_shot", "copy_engine"), last_plan()
        A, again = call(return_A=True)
        third = call()[1]
    with forced("copy_engine"):
        copied, copied_again = call()[1], call()[1]
        row_wise = kind == "rows" or k <= 128  # one block along K has a scale for each row
        takes = kind == "tensor" or (row_wise and out == BF16)
        assert (last_plan().algorithm == "copy_engine") is takes, last_plan()
    with forced("unfused"):
        _, torchs = call()
    assert A is not None and torch.equal(A.double(), torch.cat(gather(a.numbers.float())))
    meant = torch.cat(gather(a.meant))
    for i, b in enumerate(bs):
        want = meant @ b.meant + (0 if bias is None or i == 0 else bias.double())
        for y, other in ((ys[i], third[i]), (copied[i], copied_again[i])):
            assert torch.equal(y, other), "other bits in another run"
        for y in (ys[i], again[i], copied[i]):
            no_further(f"{kind} {sizes} {types} {i}", y, torchs[i], want)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_gathered(kind: str, fast: bool, sizes: tuple[int, int, int], types: tuple[torch.dtype, ...]) -> None:
    run_row(gathers_on_gpus, 2, kind, fast, sizes, types, device="cuda")


def scatters_on_gpus(
    rank: int, size: int, kind: str, fast: bool, sizes: tuple[int, int, int], types: tuple[torch.dtype, ...]
) -> None:
    (m, k, n), (of_a, of_b, out) = sizes, types
    a, b = left(kind, size * m, k, dtype=of_a), right(kind, k, n, dtype=of_b)
    bias = None if out == F32 else torch.randn(n, dtype=out)

    def call() -> torch.Tensor:
        given = a.numbers, b.numbers, a.scale, b.scale, "avg", 0, world()
        return fused_scaled_matmul_reduce_scatter(*given, bias=bias, out_dtype=out, use_fast_accum=fast)

    poison(rank)
    with forced("fused"):
        y, again = call(), call()
        assert last_plan().algorithm in ("push", "one_shot"), last_plan()
    with forced("unfused"):
        torchs = call()
    assert torch.equal(y, again), "other bits in another run"
    partial = (a.meant @ b.meant + (0 if bias is None else bias.double())) / size
    want = sum(p.chunk(size)[rank] for p in gather(partial))
    no_further(f"{kind} {sizes} {types}", y, torchs, want)


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_scattered(
    kind: str, fast: bool, sizes: tuple[int, int, int], types: tuple[torch.dtype, ...]
) -> None:
    run_row(scatters_on_gpus, 2, kind, fast, sizes, types, device="cuda")


@pytest.mark.parametrize("out", [BF16, F32])
@pytest.mark.parametrize("sizes", [(300, 1040, 400), (1024, 4096, 3072)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", [gathers_on_gpus, scatters_on_gpus])
@pytest.mark.parametrize("world_size", [pytest.param(n, marks=pytest.mark.gpu(n)) for n in (3, 4)])
def test_more_ranks(
    world_size: int, check: Callable[..., None], kind: str, sizes: tuple[int, int, int], out: torch.dtype
) -> None:
    run_row(check, world_size, kind, False, sizes, (E4M3, E4M3, out), device="cuda")


@pytest.mark.parametrize(
    ("kind", "algorithm"),
    [*((kind, "fused") for kind in KINDS), ("tensor", "copy_engine"), ("rows", "copy_engine")],
)
@on_ranks(2, device="cuda")
def test_captured(rank: int, size: int, kind: str, algorithm: str) -> None:
    """Graphs replayed with other numbers in the same memory."""
    a, b = left(kind, 512, 1024), right(kind, 1024, 512)
    drawn: Scaled = left(kind, 512, 1024)

    def call() -> torch.Tensor:
        _, (y,) = fused_all_gather_scaled_matmul(
            *(a.numbers, [b.numbers], a.scale, [b.scale], 0, world()), return_A=algorithm == "fused"
        )
        return y

    with forced(algorithm):
        call()
        assert algorithm == "fused" or last_plan().algorithm == algorithm
        graph, y = graph_of(call)
        for numbers, scale in ((a.numbers, a.scale), (drawn.numbers, drawn.scale)):
            a.numbers.copy_(numbers)
            a.scale.copy_(scale)
            graph.replay()
            torch.testing.assert_close(y, call(), rtol=0, atol=0)


@pytest.mark.parametrize("m", [32, 4096])
@on_ranks(2, device="cuda")
def test_parts_of_scales(rank: int, size: int, m: int) -> None:
    """Scales at other addresses than cuBLAS takes."""
    a, b, a_scale, b_scale = (
        torch.randn(m, 256).to(E4M3), torch.randn(128, 256).to(E4M3).t(), *torch.tensor([2.0, 0.5, 0.25])[1:].unbind()
    )  # fmt: skip
    meant_a, meant_b = a.double() * 0.5, b.double() * 0.25
    with forced("fused"):
        _, (y,) = fused_all_gather_scaled_matmul(a, [b], a_scale, [b_scale], 0, world(), return_A=False)
        z = fused_scaled_matmul_reduce_scatter(a, b, a_scale, b_scale, "sum", 0, world())
    want = sum(p.chunk(size)[rank] for p in gather(meant_a @ meant_b))
    for got, exact in ((y, torch.cat(gather(meant_a)) @ meant_b), (z, want)):
        assert error(got, exact) < 2.0**-8
