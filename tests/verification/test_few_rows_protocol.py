"""The kernel of matmul_all_reduce for few rows and its launcher on the CPU, threads as fibers, beside all-reduces."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fibers import PATIENT, Library, Ranks, build, defines_of, drawn_seed, mistakes
from test_all_reduce_protocol import KERNELS as ALL_REDUCES
from test_all_reduce_protocol import launch, reference
from weft.kernels.all_reduce import cuda_kernel as all_reduce
from weft.kernels.all_reduce.configs import AllReduceConfig
from weft.kernels.device.comm.ll_exchange import BLOCKS, ExchangeLayout
from weft.kernels.matmul_all_reduce import configs, cuda_kernel
from weft.kernels.matmul_all_reduce.configs import GROUP, MOST_ROWS, MatmulAllReduceConfig

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

BF16 = torch.bfloat16
KERNELS = ("matmul_all_reduce",)
VECTOR = 8  # elements: what a kernel that goes too far stores past the end


def compiled(
    folder: Path, size: int, groups: int, b_rows: bool, reduce_op: str, instead: tuple[str, str] | None = None
) -> Library:
    a = b = torch.empty(8, 16, dtype=BF16)
    of = b if b_rows else b.t(), reduce_op, MatmulAllReduceConfig(groups, 1, warps=4), (size, 0)
    defines = defines_of(cuda_kernel.few_rows_program(a, *of))
    defines |= defines_of(all_reduce.all_reduce_program(size, 0, BF16, reduce_op))
    beside = [(all_reduce.SOURCE, ALL_REDUCES, all_reduce._Params)]
    return build(folder, cuda_kernel.SOURCE, KERNELS, cuda_kernel._Params, defines, beside, instead)


class Calls:
    """What all ranks launch on one workspace of each, what comes of it, and what should."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranks: Ranks, reduce_op: str) -> None:
        self.monkeypatch, self.ranks = monkeypatch, ranks
        self.size, self.reduce_op = len(ranks.places), reduce_op
        self.done: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.kept: list[torch.Tensor] = []
        program = SimpleNamespace(function=ranks.function)
        monkeypatch.setattr(cuda_kernel, "few_rows_program", lambda *_: program)

    def product(self, m: int, n: int, k: int, groups: int, b_rows: bool, apart: int) -> None:
        """``apart``: elements between two rows of A, and between two rows or columns of B."""
        blocks = -(-n // (GROUP * groups))
        As = [torch.randint(-4, 5, (m, k + apart)).to(BF16)[:, :k] for _ in range(self.size)]
        rows, columns = (k, n) if b_rows else (n, k)
        stored = [
            torch.randint(-4, 5, (rows, columns + apart)).to(BF16)[:, :columns] for _ in range(self.size)
        ]
        Bs = [b if b_rows else b.t() for b in stored]
        parts = [(A.float() @ B.float()).to(BF16) for A, B in zip(As, Bs, strict=True)]
        want = reference(parts, self.reduce_op).flatten()
        for place, A, B in zip(self.ranks.places, As, Bs, strict=True):
            out = self._out(m * n, want)
            config = MatmulAllReduceConfig(groups, blocks, warps=4)
            kernel = cuda_kernel.MatmulAllReduceLauncher(place, A, B, self.reduce_op, config)
            assert kernel.grids == (blocks,)
            kernel.launch(0, (A.data_ptr(), B.data_ptr()), (out.data_ptr(),), PATIENT, place.rank)
        self.kept += [*As, *stored]

    def all_reduce(self, numel: int, form: str) -> None:
        xs = [torch.randint(-9, 9, (numel,)).to(BF16) for _ in range(self.size)]
        want, config = reference(xs, self.reduce_op), AllReduceConfig(form, 3, 64)
        for rank, x in enumerate(xs):
            out = self._out(numel, want)
            launch(self.monkeypatch, self.ranks, rank, x, out[:numel], self.reduce_op, config)
        self.kept += xs

    def _out(self, numel: int, want: torch.Tensor) -> torch.Tensor:
        out = torch.full((numel + VECTOR,), float("nan"), dtype=BF16)
        out[numel:] = 1.5
        self.done.append((out, torch.cat([want, out[numel:]])))
        return out

    def right(self) -> bool:
        if self.ranks.records.any() or not self.ranks.slots_are_empty():
            return False
        return all(torch.equal(out, want) for out, want in self.done)


@pytest.mark.parametrize(
    ("size", "groups", "b_rows", "reduce_op"),
    [(2, 1, True, "sum"), (3, 2, False, "avg"), (4, 2, True, "sum"), (9, 1, False, "sum")],
)
def test_matmuls_and_all_reduces_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, groups: int, b_rows: bool, reduce_op: str
) -> None:
    seed = drawn_seed()
    choice = random.Random(seed)
    ranks = Ranks(compiled(tmp_path, size, groups, b_rows, reduce_op), ExchangeLayout(size, 128))
    calls = Calls(monkeypatch, ranks, reduce_op)
    for call in range(12 if size < 9 else 4):
        if call % 3 == 2:
            calls.all_reduce(choice.randrange(1, 2000), choice.choice(["one_shot", "two_shot"]))
        else:
            m = (1, MOST_ROWS)[call] if call < 2 else choice.randrange(1, MOST_ROWS + 1)
            n, k = 8 * choice.randrange(1, 17 if size < 9 else 5), 8 * choice.randrange(1, 40)
            calls.product(m, n, k, groups, b_rows, 8 * choice.randrange(3))
    ranks.run(seed)
    assert calls.right()


MISTAKES = {
    "not-together": ("    __syncthreads();\n\n    // A thread's vector", "\n    // A thread's vector"),
    "lower-half-early": (
        "        __syncthreads();\n        if (warp < SUMS) sums.add",
        "        if (warp < SUMS) sums.add",
    ),
    "another-slot": ("epoch, vector, own)", "epoch, vector ^ 1, own)"),
    "other-rows": ("(group * 2 + row / 8) * 32", "(group * 2 + row / 4) * 32"),
}


@pytest.mark.parametrize("mistake", [None, *mistakes(MISTAKES, 4)])
def test_mistakes_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str | None) -> None:
    library = compiled(tmp_path, 2, 2, True, "sum", MISTAKES.get(mistake or ""))
    wrong = False
    for seed in range(6):
        torch.manual_seed(seed)
        calls = Calls(monkeypatch, Ranks(library, ExchangeLayout(2, 128)), "sum")
        for m in (13, 5):
            calls.product(m, 104, 136, 2, True, 0)
        calls.ranks.run(seed)
        wrong |= not calls.right()
    assert wrong == (mistake is not None)


def test_which_matmuls_it_takes() -> None:
    for n, groups, blocks in ((8, 1, 1), (4096, 1, 128), (4104, 2, 65), (8192, 2, 128)):
        config = configs.choose_matmul_all_reduce(16, n, 132)
        assert config is not None and (config.groups, config.blocks) == (groups, blocks)
        assert (config.blocks - 1) * config.groups * GROUP < n <= config.blocks * config.groups * GROUP
        assert config.layout(16, 4).slots >= 16 * config.groups * GROUP // 8
    assert (
        configs.choose_matmul_all_reduce(17, 64, 132) is None
        and configs.choose_matmul_all_reduce(1, 8200, 132) is None
    )
    assert (
        configs.choose_matmul_all_reduce(1, 4096, 64) == MatmulAllReduceConfig(2, 64)
        and configs.choose_matmul_all_reduce(1, 4096, 60) is None
    )
    few = configs.choose_matmul_all_reduce(1, 4096, 132)
    assert few is not None and few.blocks <= BLOCKS
    assert configs.few_rows_kernel_is_profitable(
        few, 4096, 12288
    ) and not configs.few_rows_kernel_is_profitable(few, 4096, 12288 + 8)  # 96 MiB
    assert configs.few_rows_kernel_is_profitable(
        MatmulAllReduceConfig(2, 128), 8192, 2048
    ) and not configs.few_rows_kernel_is_profitable(MatmulAllReduceConfig(2, 128), 8192, 2056)


def test_bad_arguments_are_named() -> None:
    A, B = torch.empty(17, 8, dtype=BF16), torch.empty(8, 8, dtype=BF16)
    stand_in: Any = SimpleNamespace(layout=ExchangeLayout(2, 64))
    with pytest.raises(ValueError, match=r"reduce_op: is 'max', must be one of sum, avg"):
        cuda_kernel.MatmulAllReduceLauncher(stand_in, A, B, "max", MatmulAllReduceConfig(1, 1))
    with pytest.raises(ValueError, match="a: has 17 rows, must have 1 to 16"):
        cuda_kernel.MatmulAllReduceLauncher(stand_in, A, B, "sum", MatmulAllReduceConfig(1, 1))
    with pytest.raises(ValueError, match=r"workspace: is ExchangeLayout\(.* slots=64, .* must hold .*"):
        cuda_kernel.MatmulAllReduceLauncher(stand_in, A[:16], B, "sum", MatmulAllReduceConfig(2, 1))
    assert cuda_kernel.why_no_few_rows_kernel(A.float(), B.float()) == "no kernel takes torch.float32"
    assert "K: rows of 7" in str(cuda_kernel.why_no_few_rows_kernel(A[:, :7], B[:7]))
