"""Tokens of all ranks, multiplied while copy engines bring them, without a GPU: what is launched when, and on what.

Kernels are played by what they promise; copies are made at once, as ``test_copied_products`` has it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_copied_products import STREAM, Gpus
from torch import Tensor
from weft.fused_ops.ops.experts import grouped_matmul
from weft.fused_ops.ops.experts.arriving_tokens import ArrivingTokens
from weft.kernels.all_gather_matmul import configs
from weft.kernels.all_gather_matmul.copied_products import AllGatherProductsCopied
from weft.kernels.device.jit.program import Program

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
        assert grid == p.experts * p.slices and p.pieces * 4096 >= p.width * 16
        out = at(p.to, (p.total, p.width * 8), (p.width * 8, 1), BF16)
        count = integers(p.offs, p.experts)[-1]
        for i, row in enumerate(integers(p.rows, p.total)[:count]):
            token = min(max(row, 0), p.tokens - 1)
            if (p.first <= token < p.end) == bool(p.takes_own):
                out[i] = at(getattr(p, "from") + token * p.stride * 16, (p.width * 8,), (1,), BF16)

    def split_experts(self, grid: int, p: Any) -> None:
        rows, offs = integers(p.rows, p.total), integers(p.offs, grid)
        own, others = (
            at(place, (2, n * grid), (n * grid, 1), torch.int32) for place, n in ((p.own, 1), (p.others, 2))
        )
        for e, (begin, end) in enumerate(zip([0, *offs], offs, strict=False)):
            is_own = [p.first <= row < p.end for row in rows[begin:end]]
            first = begin + (is_own.index(True) if True in is_own else end - begin)
            rest = is_own[first - begin :]
            last = first + (rest.index(False) if False in rest else len(rest))
            own[:, e] = torch.tensor([first, last])
            others[:, 2 * e : 2 * e + 2] = torch.tensor([[begin, last], [first, end]])

    def grouped_matmul(self, grid: int, p: Any) -> None:
        a = at(p.a[0], (p.total, p.k), (p.k, 1), BF16)
        ends = integers(p.ends, p.groups)
        begins = integers(p.begins, p.groups) if p.begins else [0, *ends[:-1]]
        for i in range(p.bs):
            b, c = self.bs[p.b[i][0]], at(p.c[i], (p.total, p.n[i]), (p.n[i], 1), BF16)
            for g, (begin, end) in enumerate(zip(begins, ends, strict=True)):
                if begin < end:
                    c[begin:end] = (a[begin:end].double() @ b[g // p.parts].double()).to(BF16)


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
    splits, tokens = m == 1000, torch.randn(W * m, K).to(BF16)
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
            call = ArrivingTokens(shards[rank], terms, rows, offs, (rank, W), return_A=turn == 1)
            for out in (*call.outs, *([] if call.every is None else [call.every])):
                out.fill_(float("nan"))
            kernel.as_they_come(shards[rank], None, call.take, 5, STREAM)
            names = [said if isinstance(said, str) else said[0] for said in gpus.said]
            own = ["take_rows", *(["split_experts", "grouped_matmul"] if splits else [])]
            arrive = ["arrive"] * (W - 1)
            assert names[:1] + names[2:-1] == [
                "acquire",
                *own,
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
    call = ArrivingTokens(
        tokens, [(bs[0], None)], none, torch.zeros(1, dtype=torch.int32), (0, W), return_A=False
    )
    kernel.as_they_come(tokens, None, call.take, 5, STREAM)
    assert "take_rows" not in gpus.said and gpus.said[-2] == "leave" and call.outs[0].shape == (0, 8)
