"""torch's own product with block-wise scales, where it has one: how it is called, and where it is chosen."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scaled_operands import E4M3, E5M2, left, right
from test_one_shot_calls import Driver, put
from weft.kernels.all_gather_matmul import configs as gather
from weft.kernels.all_gather_matmul import scaled as launches
from weft.kernels.all_gather_matmul.configs import GatherScales
from weft.kernels.all_gather_matmul.scaled import AllGatherScaledMatmulOneShot
from weft.kernels.device.gemm import scaling
from weft.kernels.device.gemm.one_shot import OneShotConfig
from weft.kernels.matmul_reduce_scatter import configs as scatter

BF16, SIZE = torch.bfloat16, 3


def blocks(*, travels: bool, torchs: bool = True) -> scaling.ScaledProducts:
    return scaling.ScaledProducts((E4M3, E4M3), scaling.ScaleKind.BLOCKS, BF16, True, travels, torchs)


@pytest.mark.parametrize("k", [512, 1152, 272])
@pytest.mark.parametrize("whole", [False, True])
def test_scales_lie_as_torch_wants_them(k: int, whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of A with rows contiguous; those of B with K contiguous, a multiple of four of them."""
    a, b, bias = left("blocks", 8, k), right("blocks", k, 400), torch.randn(400).to(BF16)
    given: dict[str, Any] = {}

    def out(x: Any, y: Any, by_x: Any, rx: Any, _: Any, by_y: Any, ry: Any, *more: Any, out: Any) -> Any:
        *_, fast = more
        given.update(by_x=by_x[0], by_y=by_y[0], recipes=(rx, ry), fast=fast)
        count = -(-k // 128)
        wide = scaling.exact_product(x, y, scaling.Scales(scaling.ScaleKind.BLOCKS, by_x[0], by_y[0][:count]))
        return out.copy_(wide + more[1])

    monkeypatch.setattr(torch.ops.aten, "_scaled_mm_v2", SimpleNamespace(out=out))
    scale = b.scale
    if whole:  # as torch wants it already, where K has four blocks
        scale = scale.t().contiguous().t()
    result = torch.full((8, 400), float("nan"), dtype=BF16)
    done = scaling.block_product(
        a.numbers, b.numbers, scaling.Scales(scaling.ScaleKind.BLOCKS, a.scale, scale), bias, result
    )
    count = -(-k // 128)
    padded = -(-count // 4) * 4
    assert given["by_x"].shape == (8, count) and given["by_x"].stride() == (1, 8)
    assert given["by_y"].shape == (padded, 4) and given["by_y"].stride() == (1, padded)
    assert given["recipes"] == ([4], [5]) and given["fast"] is False
    assert (given["by_y"].data_ptr() == scale.data_ptr()) == (whole and padded * 128 == k)
    want = a.meant @ b.meant + bias.double()
    assert ((done.double() - want).norm() / want.norm()) < 4e-3


def test_where_there_is_none() -> None:
    """On CPU, of rows whose scales are no whole 16 bytes, and of e5m2."""
    gpu = torch.device("cuda", 0)
    assert not scaling.has_block_product(8, (E4M3, E4M3), torch.device("cpu"))
    assert not scaling.has_block_product(6, (E4M3, E4M3), gpu)
    for types in ((E5M2, E4M3), (E4M3, E5M2)):
        assert not scaling.has_block_product(8, types, gpu)
    if torch.version.cuda is None:
        assert not scaling.offers_block_products(gpu)


@pytest.mark.parametrize("m", [4, 12])
def test_a_gather_in_one_shot(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and scales go together; the ranks' scales are put side by side before the product."""
    k, driver = 400, Driver(monkeypatch)
    shards, bs = [left("blocks", m, k) for _ in range(SIZE)], [right("blocks", k, n) for n in (144, 48)]
    bias = torch.randn(48).to(BF16)

    def product(a: Any, b: Any, scales: scaling.Scales, bias: Any, out: torch.Tensor) -> torch.Tensor:
        wide = scaling.exact_product(a, b, scales)
        return out.copy_(wide if bias is None else wide + bias)

    monkeypatch.setattr(launches, "block_product", product)
    mine = shards[1]
    scales = GatherScales(mine.scale.t(), [b.scale for b in bs], [None, bias])
    pairs = mine.numbers.view(BF16), [b.numbers.t().view(BF16).t() for b in bs]
    example = gather.GatherKernelCall(*pairs, 132, scaled=blocks(travels=True))
    config = gather.choose_one_shot_gather(example.problem(SIZE))
    assert config is not None
    kernel = AllGatherScaledMatmulOneShot(driver.workspace(), example, scales, config)
    numbers = torch.stack([x.numbers.view(torch.uint8) for x in shards])
    sent = torch.stack([x.scale.t() for x in shards]).contiguous()

    def exchange(p: Any) -> None:
        put(p.gathered, numbers)
        put(p.gathered_scales, sent)

    driver.launch = exchange
    for a_scale in (scales.a, mine.scale):  # on the slow path, and on the fast one
        results = [torch.full((SIZE * m, n), float("nan"), dtype=BF16) for n in (144, 48)]
        given = mine.numbers, *(b.numbers for b in bs), a_scale, *(b.scale for b in bs), bias
        kernel.call(given, results, 5, 7)
        params, _ = driver.launched[-1]
        assert (params.a, params.scales) == (mine.numbers.data_ptr(), mine.scale.data_ptr())
        assert params.scale_vectors * 16 == 4 * m * 4 and params.vectors * 16 == m * k + 4 * m * 4
        whole = torch.cat([x.meant for x in shards])
        for i, (b, result) in enumerate(zip(bs, results, strict=True)):
            want = whole @ b.meant + (bias.double() if i else 0)
            assert ((result.double() - want).norm() / want.norm()) < 4e-3


# 2 H100, captured, microseconds: weft's kernel, and the group's own collective with torch's product with block-wise
# scales (bench/results/h100-x2-block-products.txt).
GATHERS = {
    (1024, 4096, 6144): (51.5, 70.5),
    (4096, 4096, 6144): (152.6, 159.4),
    (8192, 4096, 6144): (407.9, 280.1),
    (1024, 4096, 28672): (131.4, 146.9),
    (4096, 4096, 28672): (621.9, 496.5),
    (8192, 4096, 28672): (1233.9, 935.3),
}
SCATTERS = {
    (1024, 4096, 4096): (30.5, 52.9),
    (4096, 4096, 4096): (91.3, 162.7),
    (8192, 4096, 4096): (166.3, 298.0),
    (1024, 14336, 4096): (67.8, 83.9),
    (4096, 14336, 4096): (251.3, 318.9),
    (8192, 14336, 4096): (519.2, 609.0),
}


def of_gather(m: int, k: int, n: int, *, torchs: bool = True) -> gather.AllGatherMatmulProblem:
    scaled = blocks(travels=True, torchs=torchs)
    return gather.AllGatherMatmulProblem(m // 2, (n // 2,), k // 2, 2, 132, scaled=scaled)


@pytest.mark.parametrize("sizes", GATHERS)
def test_no_gather_takes_the_slower_one(sizes: tuple[int, int, int]) -> None:
    push, unfused = GATHERS[sizes]
    problem = of_gather(*sizes)
    _, config = gather.rank_gather_kernels(problem)[0]
    assert isinstance(config, OneShotConfig) or push < unfused
    without = of_gather(*sizes, torchs=False)
    _, config = gather.rank_gather_kernels(without)[0]
    assert not isinstance(config, OneShotConfig) and gather.gather_is_profitable(without)


def test_what_is_too_large_for_one_shot_is_left_to_torch() -> None:
    large = 8192, 8192, 57344
    assert not gather.gather_is_profitable(of_gather(*large))
    assert gather.gather_is_profitable(of_gather(*large, torchs=False))


@pytest.mark.parametrize("sizes", SCATTERS)
def test_scatters_stay_fused(sizes: tuple[int, int, int]) -> None:
    push, unfused = SCATTERS[sizes]
    assert push < unfused
    m, k, n = sizes
    problem = scatter.MatmulReduceScatterProblem(m // 2, n, k // 4, 2, 132, scaled=blocks(travels=False))
    assert scatter.scatter_is_profitable(problem)
    assert not isinstance(scatter.rank_scatter_kernels(problem)[0][1], OneShotConfig)
