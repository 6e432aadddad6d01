"""The grouped product and its launcher on the CPU, threads as fibers: rows that are taken, tiles that are found."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from fibers import Library
from matmul_ops import numbers, result
from matmuls import BROAD, SMALL, TWO_AND_A_HALF, WIDE, Matmuls, build
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
    tokens: int = 50
    by_rows: bool = True
    rows: bool = False  # N is contiguous in B, not K
    bias: bool = False
    left: int = 3
    raster_group: int = 1
    blocks: int = 4

    def config(self) -> GroupedConfig:
        return GroupedConfig(self.tile, self.raster_group)

    def b(self) -> torch.Tensor:
        shape = len(self.counts), self.k, self.n
        return numbers(*shape) if self.rows else numbers(shape[0], self.n, self.k).mT

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        program = cuda_kernel.grouped_program(self.b(), self.config(), by_rows=self.by_rows)
        return build(cuda_kernel.SOURCE, cuda_kernel._Params, tuple(program.defines.items()), instead)

    def is_right(self, monkeypatch: pytest.MonkeyPatch, library: Library, seed: int) -> bool:
        """Of one launch; the offsets and rows of ``wild`` ones are looked at by ``stays_inside``."""
        torch.manual_seed(seed)
        total = sum(self.counts) + self.left
        a = (
            numbers(self.tokens if self.by_rows else total, self.k + 8)[:, 8:]
            if self.by_rows
            else numbers(total, self.k)
        )
        rows = torch.randint(self.tokens, (total,), dtype=torch.int32) if self.by_rows else None
        offs = torch.tensor(self.counts).cumsum(0).int()
        b, bias = self.b(), numbers(len(self.counts), self.n) if self.bias else None
        taken = a if rows is None else a[rows.long()]
        want = torch.full((total, self.n), float("nan"), dtype=torch.bfloat16)
        begin = 0
        for e, end in enumerate(offs.tolist()):
            product = taken[begin:end].double() @ b[e].double()
            want[begin:end] = (product + (0 if bias is None else bias[e])).bfloat16()
            begin = end
        out, want = result(want)
        self.launch(monkeypatch, library, seed, (a, b, out[:total], (offs, rows), bias))
        return torch.allclose(out, want, rtol=0, atol=0, equal_nan=True)

    def launch(self, monkeypatch: pytest.MonkeyPatch, library: Library, seed: int, given: tuple) -> None:  # type: ignore[type-arg]
        ranks = Matmuls(monkeypatch, library, Layout(1, 1, 64), (1, 2000))
        kernel = cuda_kernel.GroupedMatmul(
            given[0], given[1], self.config(), self.blocks, by_rows=self.by_rows
        )
        kernel.launch(*given)
        ranks.run(seed)
        assert not ranks.strays


CASES = {
    "rows": Grouped((70, 0, 1, 130, 64), 72, 200),
    "many-experts": Grouped((0,) * 40 + (3, 0, 65) + (0,) * 30 + (1,), 40, 72, blocks=6),
    "one-expert": Grouped((300,), 136, 72, raster_group=2),
    "all-empty": Grouped((0, 0), 72, 72),
    "wide": Grouped((140, 7, 260), 40, 264, WIDE, bias=True),
    "n-contiguous": Grouped((65, 0, 140), 64, 136, BROAD, rows=True, bias=True),
    "odd-n-contiguous": Grouped((65, 130), 200, 72, TWO_AND_A_HALF, rows=True),
    "deep": Grouped((65, 5), 72, 1032, DEEP),
    "in-order": Grouped((70, 0, 1, 130, 64), 72, 200, by_rows=False, bias=True),
    "in-order-wide": Grouped((3, 260, 0), 136, 72, WIDE, by_rows=False, rows=False, blocks=2),
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
