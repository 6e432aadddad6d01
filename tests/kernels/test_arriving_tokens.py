"""Tokens of all ranks, multiplied while copy engines bring them, without a GPU: what is launched when, and on what.

take_rows.cu runs as C++. The other kernels are played by what they promise; copies are made at once, as
``test_copied_products`` has it.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from once import made_once
from test_copied_products import STREAM, Gpus
from torch import Tensor
from weft.fused_ops.ops.experts import grouped_matmul
from weft.fused_ops.ops.experts.arriving_tokens import ArrivingTokens
from weft.kernels.all_gather_matmul import configs
from weft.kernels.all_gather_matmul.copied_products import AllGatherProductsCopied
from weft.kernels.device.jit.program import Program
from weft.kernels.grouped_matmul.take_rows import PROGRAM, Own, take_rows

W, K, NS = 3, 48, (40, 24)
BF16 = torch.bfloat16


def at(address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What lies there, not a copy."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    memory = (ctypes.c_byte * ((last + 1) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)


def integers(address: int, count: int) -> list[int]:
    found: list[int] = at(address, (count,), (1,), torch.int32).tolist()
    return found


@functools.cache
def compiled() -> ctypes.CDLL:
    around, flags = (
        Path(__file__).with_name("taken_rows.cpp"),
        ["-std=c++20", "-O1", "-w", "-fPIC", "-shared"],
    )
    command = ["g++", *flags, "-pthread", f'-DKERNELS="{PROGRAM.path}"', around, "-o"]
    texts = [around.read_text(), PROGRAM.path.read_text()]
    return ctypes.CDLL(
        str(made_once([*flags, *texts], lambda to: subprocess.run([*command, to], check=True)))
    )


class Kernels(Gpus):
    """Those of a grouped product play their part when they are launched."""

    def __init__(self, bs: list[Tensor], *given: Any) -> None:
        super().__init__(*given)
        self.bs = {b.data_ptr(): b for b in bs}

    def tensor_map(self, *tiled: Any) -> bytes:
        return int(tiled[2]).to_bytes(128, "little")

    def function(self, program: Program, name: str, shared: int) -> Any:
        if program.path.parent.name != "grouped_matmul":
            return super().function(program, name, shared)

        def launch(grid: int, block: int, params: Any, stream: int, shared: int = 0) -> None:
            assert stream == STREAM
            self.said.append(name)
            getattr(self, name)(grid, params)

        return SimpleNamespace(launch=launch, most_clusters=lambda *_: 66)

    def take_rows(self, grid: int, p: Any) -> None:
        compiled().run_take_rows(grid, 128, ctypes.byref(p))

    def grouped_matmul(self, grid: int, p: Any) -> None:
        a = at(p.a[0], (p.total, p.k), (p.k, 1), BF16)
        ends = integers(p.ends, p.groups)
        for i in range(p.bs):
            b, c = self.bs[p.b[i][0]], at(p.c[i], (p.total, p.n[i]), (p.n[i], 1), BF16)
            for g, (begin, end) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                if begin < end:
                    c[begin:end] = (a[begin:end].double() @ b[g].double()).to(BF16)


@pytest.fixture(autouse=True)
def prepared_anew() -> Iterator[None]:
    """No launcher of a GPU that is none is kept."""
    grouped_matmul._prepared.cache_clear()
    yield
    grouped_matmul._prepared.cache_clear()


@pytest.mark.parametrize("in_order", [True, False])
@pytest.mark.parametrize(("m", "experts"), [(1000, 2), (13, 5)])
def test_each_rank_multiplies_all_tokens(
    monkeypatch: pytest.MonkeyPatch, m: int, experts: int, in_order: bool
) -> None:
    tokens = torch.randn(W * m, K).to(BF16)
    bs = [torch.randn(experts, n, K).to(BF16).mT for n in NS]
    expert = torch.randint(experts + 1, (W * m,))  # the last one is another rank's
    rows = torch.cat([torch.where(expert == e)[0] for e in range(experts)]).int()
    offs = expert.bincount(minlength=experts + 1)[:experts].cumsum(0).int()
    if not in_order:
        parts = [rows[begin:end] for begin, end in zip([0, *offs.tolist()], offs.tolist(), strict=False)]
        rows = torch.cat([part[torch.randperm(len(part))] for part in parts])
    shards = [tokens[r * m :][:m] for r in range(W)]
    example = [configs.GatherKernelCall(a, [], 108) for a in shards]
    gpus = Kernels(bs, configs.copied_layout(example[0].problem(W)), monkeypatch)
    kernels: list[Any] = [AllGatherProductsCopied(gpus.workspace(rank), example[rank]) for rank in range(W)]
    for turn in range(2):  # in the first one the tokens of ranks after this one have not come
        for rank, kernel in enumerate(kernels):
            gpus.said.clear()
            terms = [(b, None) for b in bs]
            call = ArrivingTokens(shards[rank], terms, (rows, offs), (rank, W), return_A=turn == 1)
            if call.every is not None:
                call.every.fill_(float("nan"))
            kernel.as_they_come(shards[rank], None, call.take, 5, STREAM)
            names = [said if isinstance(said, str) else said[0] for said in gpus.said]
            arrive = ["arrive"] * (W - 1)
            assert names[:1] + names[2:-1] == [
                "acquire",
                "take_rows",
                *arrive,
                "take_rows",
                "grouped_matmul",
                "leave",
            ]
            if not turn:
                continue
            assert call.every is not None and torch.equal(call.every, tokens)
            for b, out in zip(bs, call.outs, strict=True):
                of_row = torch.searchsorted(offs, torch.arange(len(rows)), right=True)
                want = torch.einsum("rk,rkn->rn", tokens[rows.long()].double(), b.double()[of_row])
                assert torch.equal(out, want.to(BF16))


def test_without_rows_tokens_are_still_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks may have some."""
    tokens, bs = torch.randn(2, K).to(BF16), [torch.randn(1, 8, K).to(BF16).mT]
    example = configs.GatherKernelCall(tokens, [], 108)
    gpus = Kernels(bs, configs.copied_layout(example.problem(W)), monkeypatch)
    kernel: Any = AllGatherProductsCopied(gpus.workspace(0), example)
    none = torch.zeros(0, dtype=torch.int32)
    index = none, torch.zeros(1, dtype=torch.int32)
    call = ArrivingTokens(tokens, [(bs[0], None)], index, (0, W), return_A=False)
    kernel.as_they_come(tokens, None, call.take, 5, STREAM)
    assert "take_rows" not in gpus.said and gpus.said[-2] == "leave" and call.outs[0].shape == (0, 8)


WILD = {  # ends of experts' rows, of which there are 300
    "rising": (7, 7, 200, 290),
    "too large": (7, 250, 2**31 - 1, 301),
    "negative": (-(2**31), 20, -1, 40),
    "decreasing": (290, 100, 40, 90),
    "all too large": (500, 400, 2**31 - 1, 600),
    "all negative": (-1, -300, -(2**31), -5),
}


def ranges(offs: tuple[int, ...], total: int) -> Iterator[tuple[int, int]]:
    """Of each expert: from where the one before ends, as far as there are rows."""
    for before, end in zip((0, *offs), offs, strict=False):
        begin = min(max(before, 0), total)
        yield begin, max(min(end, total), begin)


def guarded(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """A tensor of -1 and the larger one around it."""
    whole = torch.full((rows + 2000, columns), -1, dtype=dtype, device=device)
    return whole[1000:-1000], whole


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))])
@pytest.mark.parametrize("name", WILD)
def test_wild_numbers_stay_inside(monkeypatch: pytest.MonkeyPatch, name: str, device: str) -> None:
    total, tokens, own = 300, 53, Own(20, 41, 53)
    if device == "cpu":
        example = configs.GatherKernelCall(torch.zeros(2, K, dtype=BF16), [], 108)
        Kernels([], configs.copied_layout(example.problem(W)), monkeypatch)
    rows = torch.randint(-20, 80, (total,), dtype=torch.int32, device=device)
    rows[0], rows[99], rows[199] = 2**31 - 1, -(2**31), 2**31 - 1
    offs = torch.tensor(WILD[name], dtype=torch.int32, device=device)
    token = rows.clamp(0, tokens - 1).cpu()
    is_own = (token >= own.first) & (token < own.end)
    in_experts = torch.zeros(total, dtype=torch.bool)
    for begin, end in ranges(WILD[name], total):
        in_experts[begin:end] = True
    a, _ = guarded(tokens, K, BF16, device)
    a.copy_(torch.rand(tokens, K))
    for of, given, takes_own, taken in (
        (a, None, True, in_experts),
        (a[own.first : own.end], own, True, in_experts & is_own),
        (a, own, False, in_experts & ~is_own),
    ):
        out, around = guarded(total, K, BF16, device)
        want = around.clone().cpu()
        want[1000:-1000][taken] = a.cpu()[token[taken].long()]
        take_rows(of, rows, offs, out, given, takes_own=takes_own)
        assert torch.equal(around.cpu(), want)
