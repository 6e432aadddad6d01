"""fused_matmul_all_gather by copy engines, without a GPU: how a product is cut, and what is put where.

Ranks are threads. Copies and products are made at once; the kernels of acquire.cu wait as those do.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import test_copied_products as copied
import torch
from test_copied_products import STREAM, W
from weft.kernels.device.jit.program import Program
from weft.kernels.matmul_all_gather import configs
from weft.kernels.matmul_all_gather.configs import MatmulAllGatherKernelCall, MatmulAllGatherProblem
from weft.kernels.matmul_all_gather.copied_products import MatmulAllGatherCopied, choose_copied_pieces
from weft.symm_mem.layout import Layout

LATE = 30  # seconds of a wait


class Gpus(copied.Gpus):
    """Whose kernels wait for each other."""

    def __init__(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(layout, monkeypatch)
        self.words = self.of_ranks[:, : layout.words * 4].view(torch.int32)
        self.now = threading.local()  # its rank

    def copy_rows(self, to: int, source: int, shape: tuple[int, int], step: int, stream: int) -> None:
        for row in range(shape[0]):
            self.copy(to + row * shape[1], source + row * step, shape[1], stream)

    def function(self, program: Program, name: str, shared: int) -> Any:
        def bound(grid: int, block: int, params: Any) -> Callable[[int], None]:
            return lambda stream: getattr(self, name)(params)

        return SimpleNamespace(bound=bound)

    def until(self, there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LATE
        while not there():
            assert time.monotonic() < deadline, "a wait expired"
            time.sleep(0)

    def acquire(self, params: Any) -> None:
        words = self.words[self.now.rank]
        epoch = int(words[params.buffer.epoch])
        self.until(
            lambda: all(words[params.buffer.done + p] >= epoch for p in range(W) if p != self.now.rank)
        )
        words[params.ticket] = epoch + 1

    def arrive(self, params: Any) -> None:
        words = self.words[self.now.rank]
        flag = params.buffer.flags + params.peer * params.buffer.flags_per_rank
        self.until(lambda: bool(words[flag] > words[params.buffer.epoch]))

    def leave(self, params: Any) -> None:
        words = self.words[self.now.rank]
        words[params.buffer.epoch] += 1
        for peer in range(W):
            self.words[peer][params.buffer.done + self.now.rank] = words[params.buffer.epoch]

    def workspace(self, rank: int, takes_turns: bool = True) -> Any:
        """``takes_turns``: calls begin with the other buffer than the last one took, else with the first one."""
        self.now.rank = rank
        made = super().workspace(rank)

        def take_buffer(buffer: int) -> int:
            made.last_buffer = buffer
            return buffer

        made.last_buffer, made.take_buffer = 0, take_buffer
        made.next_buffer = lambda: take_buffer(1 - made.last_buffer if takes_turns else 0)
        return made


@pytest.mark.parametrize("takes_turns", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("m", "n"),
    [(5, 1000), (700, 96), (300, 333), (8, 257)],
    ids=["columns", "rows", "no multiple of 16 bytes", "one column in the last"],
)
def test_all_ranks_have_all_columns(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, m: int, n: int, takes_turns: bool
) -> None:
    monkeypatch.setattr(configs, "_LEAST_US", 1e-3)
    k = 24
    wide = torch.randint(-3, 4, (m, k + 8)).to(dtype)
    bs = [torch.randint(-3, 4, (n, k)).to(dtype).t() for _ in range(W)]
    calls = [MatmulAllGatherKernelCall(wide[:, 8:], b) for b in bs]
    problem = calls[0].problem(W)
    assert len(problem.pieces()) > 1
    gpus = Gpus(configs.copied_pieces_layout(problem), monkeypatch)
    want = torch.cat([wide[:, 8:].double() @ b.double() for b in bs], 1)

    def rank_of(rank: int) -> list[torch.Tensor]:
        gpus.now.rank = rank
        kernel = MatmulAllGatherCopied(gpus.workspace(rank, takes_turns), calls[rank])
        outs = [torch.full((m, W * n), float("nan")).to(dtype) for _ in range(3)]
        for out in outs:
            kernel.call([*calls[rank]], [out], 5, STREAM)
        return outs

    with ThreadPoolExecutor(W) as pool:
        for outs in pool.map(rank_of, range(W)):
            assert all(torch.equal(out, want.to(dtype)) for out in outs)


@pytest.mark.parametrize(("m", "n"), [(4096, 75968), (75968, 4096), (4096, 64128), (1024, 75968)])
@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_pieces_are_the_whole_product(m: int, n: int, world_size: int) -> None:
    problem = MatmulAllGatherProblem(m, n, 4096, world_size)
    seen, pieces = torch.zeros(m // 64, n // 64, dtype=torch.int8), problem.pieces()
    for rows, columns in pieces:
        assert not (rows.start % 128 or columns.start % 128)
        seen[rows.start // 64 : rows.stop // 64, columns.start // 64 : columns.stop // 64] += 1
    assert bool((seen == 1).all()) and 2 <= len(pieces) <= configs.MOST_PIECES
    assert configs.copied_pieces_save_us(problem) > 0


def test_small_products_are_not_cut() -> None:
    for m, n in ((64, 75968), (0, 4096), (4096, 0), (1, 1)):
        problem = MatmulAllGatherProblem(m, n, 4096, 2)
        assert problem.pieces() == [] and configs.copied_pieces_save_us(problem) == 0
    a, b = torch.empty(64, 4096), torch.empty(4096, 512)
    assert choose_copied_pieces(MatmulAllGatherKernelCall(a, b), 2) == "too little is multiplied and gathered"


def test_a_workspace_for_a_smaller_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(configs, "_LEAST_US", 1e-3)
    call = MatmulAllGatherKernelCall(torch.empty(8, 16), torch.empty(16, 512))
    gpus = Gpus(configs.copied_pieces_layout(replace(call.problem(W), m=4)), monkeypatch)
    with pytest.raises(ValueError, match=r"workspace: is .*, must hold "):
        MatmulAllGatherCopied(gpus.workspace(0), call)
