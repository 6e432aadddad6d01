"""The grouped product and its launcher on the CPU, threads as fibers: rows that are taken, tiles that are found."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from fibers import Library
from matmul_ops import numbers, result
from matmuls import BROAD, SMALL, TWO_AND_A_HALF, WIDE, Matmuls, build
from torch.nn.functional import silu
from weft.kernels.device.gemm.gemm_tiles import Tile
from weft.kernels.grouped_matmul import cuda_kernel
from weft.kernels.grouped_matmul.configs import GroupedConfig
from weft.symm_mem.layout import Layout

DEEP = Tile(64, 64, 5, 0.0)


@dataclass
class Grouped:
    """A product whose experts have ``counts`` rows, and after them come ``left`` of none."""

    counts: tuple[int, ...]
    n: int
    k: int
    tile: Tile = SMALL
    rows: bool = False  # N is contiguous in B, not K
    bias: bool = False
    left: int = 3
    raster_group: int = 1
    blocks: int = 4
    more: tuple[int, ...] = ()  # N of further Bs
    gated: bool = False

    def config(self) -> GroupedConfig:
        return GroupedConfig(self.tile, self.raster_group, self.gated)

    def bs(self) -> list[torch.Tensor]:
        experts, k, ns = len(self.counts), self.k, (self.n, *self.more)
        return [numbers(experts, k, n) if self.rows else numbers(experts, n, k).mT for n in ns]

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        program = cuda_kernel.grouped_program(self.bs(), self.config())
        return build(cuda_kernel.SOURCE, cuda_kernel._Params, program.defines, instead)

    def is_right(self, monkeypatch: pytest.MonkeyPatch, library: Library, seed: int) -> bool:
        """Of one launch; the offsets and rows of ``wild`` ones are looked at by ``stays_inside``."""
        torch.manual_seed(seed)
        total = sum(self.counts) + self.left
        a = numbers(total, self.k + 8)[:, 8:]
        offs = torch.tensor(self.counts).cumsum(0).int()
        terms = [(b, numbers(len(self.counts), b.shape[2]) if self.bias else None) for b in self.bs()]
        ns = [b.shape[2] // (1 + self.gated) for b, _ in terms]
        wanted = [torch.full((total, n), float("nan"), dtype=torch.bfloat16) for n in ns]
        for e, (begin, end) in enumerate(itertools.pairwise([0, *offs.tolist()])):
            for (b, bias), want in zip(terms, wanted, strict=True):
                product = a[begin:end].double() @ b[e].double() + (0 if bias is None else bias[e])
                if self.gated:
                    gate, up = product.chunk(2, 1)
                    product = silu(gate) * up
                want[begin:end] = product.bfloat16()
        results = [result(want) for want in wanted]
        self.launch(monkeypatch, library, seed, (a, terms, [out[:total] for out, _ in results], offs))
        rounded = 2**-7 * self.gated  # of what lies between two numbers; else products are exact
        return all(torch.allclose(out, want, rtol=rounded, atol=0, equal_nan=True) for out, want in results)

    def launch(self, monkeypatch: pytest.MonkeyPatch, library: Library, seed: int, given: tuple) -> None:  # type: ignore[type-arg]
        ranks = Matmuls(monkeypatch, library, Layout(1, 1, 64), (1, 2000))
        bs = [b for b, _ in given[1]]
        kernel = cuda_kernel.GroupedMatmul(given[0], bs, self.config(), self.blocks)
        kernel.launch(*given)
        ranks.run(seed)
        assert not ranks.strays


CASES = {
    "many-experts": Grouped((0,) * 40 + (3, 0, 65) + (0,) * 30 + (1,), 40, 72, blocks=6),
    "one-expert": Grouped((300,), 136, 72, raster_group=2),
    "all-empty": Grouped((0, 0), 72, 72),
    "wide": Grouped((140, 7, 260), 40, 264, WIDE, bias=True),
    "n-contiguous": Grouped((65, 0, 140), 64, 136, BROAD, rows=True, bias=True),
    "odd-n-contiguous": Grouped((65, 130), 200, 72, TWO_AND_A_HALF, rows=True),
    "deep": Grouped((65, 5), 72, 1032, DEEP),
    "in-order": Grouped((70, 0, 1, 130, 64), 72, 200, bias=True),
    "three-bs": Grouped((70, 1, 200), 72, 72, bias=True, more=(200, 8), raster_group=2),
    "two-bs-n-contiguous": Grouped((65, 0, 140), 64, 136, BROAD, rows=True, bias=True, more=(192,)),
    "gated": Grouped((70, 0, 1, 300, 64), 272, 72, Tile(128, 256, 2, 0.0), bias=True, gated=True),
    "gated-two-bs": Grouped((70, 0, 1, 130), 144, 72, Tile(64, 128, 2, 0.0), more=(16,), gated=True),
    "gated-few-columns": Grouped((70, 200), 48, 72, Tile(128, 128, 2, 0.0), bias=True, gated=True),
    "in-order-wide": Grouped((3, 260, 0), 136, 72, WIDE, rows=False, blocks=2),
}


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if item.path == request.path and "name" in getattr(getattr(item, "callspec", None), "params", {}):
            CASES[item.callspec.params["name"]].compiled()


@pytest.mark.parametrize("name", CASES)
def test_products(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    for seed in range(3):
        assert case.is_right(monkeypatch, case.compiled().result(), seed), f"{name}, seed {seed}"
