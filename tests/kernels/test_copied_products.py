"""Products by copy engines and torch's kernels, without a GPU: what goes where, and what is multiplied when.

Copies are made at once, waits and the end of an epoch are only noted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scaled_operands import ROUNDED, left, right
from torch_versions import needs_row_wise_products
from weft.kernels.all_gather_matmul import configs
from weft.kernels.all_gather_matmul.copied_products import AllGatherProductsCopied
from weft.kernels.device.device_spec import H100
from weft.kernels.device.gemm.scaling import ScaledProducts, ScaleKind, as_pairs
from weft.kernels.device.jit.program import Program
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import copied_products
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterKernelCall
from weft.kernels.matmul_reduce_scatter.copied_products import MatmulReduceScatterCopied
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.layout import Layout

W, M, K, STREAM = 3, 6, 48, 7
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
KINDS = {"tensor": ScaleKind.TENSOR, "rows": ScaleKind.ROWS}


class Gpus(cuda_state.CudaState):
    """In place of CUDA: W ranks in one process. ``said``: what is enqueued besides copies."""

    def __init__(self, layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.of_ranks = torch.zeros(W, layout.bytes, dtype=torch.uint8)
        self.layout, self.said = layout, list[Any]()
        monkeypatch.setattr(cuda_state, "state", self)

    def own_stream(self, owner: object, device: torch.device) -> int:
        return STREAM + 1

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        assert stream == STREAM + 1
        ctypes.memmove(to, source, size)

    def current_stream(self, device: int | None) -> int:
        return STREAM

    def stream(self, handle: int, device: int) -> Any:  # type: ignore[override]
        return SimpleNamespace(wait_event=lambda event: self.said.append((handle, "waits for", event)))

    def event(self) -> Any:
        return SimpleNamespace(record=lambda stream: None)

    def function(self, program: Program, name: str, shared: int) -> Any:
        def bound(grid: int, block: int, params: Any) -> Callable[[int], None]:
            assert (grid, block) == (1, 32)

            def run(stream: int) -> None:
                assert stream == STREAM
                words = ctypes.cast(params.watch.words, ctypes.POINTER(ctypes.c_uint32))
                if name == "acquire":
                    words[params.ticket] = words[params.buffer.epoch] + 1
                flag = params.buffer.flags + params.peer * params.buffer.flags_per_rank
                self.said.append((name, params.peer, words[flag]) if name == "arrive" else name)

            return run

        return SimpleNamespace(bound=bound)

    def workspace(self, rank: int) -> Any:
        def buffer(of: int, number: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            assert of == rank
            size = shape[0] * shape[1] * dtype.itemsize
            return self.of_ranks[rank][self.layout.buffer(number) :][:size].view(dtype).view(shape)

        return SimpleNamespace(
            rank=rank, world_size=W, layout=self.layout, address=self.of_ranks[rank].data_ptr(),
            span=self.of_ranks.stride(0), heap=SimpleNamespace(device=torch.device("cuda", 0)), copy_streams={},
            fault=SimpleNamespace(address=1 << 19, record=0), buffer=buffer, lock=nullcontext(), next_buffer=lambda: 0,
            raise_if_broken=lambda op, inside: self.said.append(op), abandon=self.said.append,
        )  # fmt: skip


def example_of(a: torch.Tensor, bs: list[torch.Tensor], kind: str, *, travels: bool) -> Any:
    scaled = ScaledProducts((E4M3, E4M3), KINDS[kind], BF16, promote=False, travels=travels)
    pairs = [as_pairs(b.t(), BF16).t() for b in bs]
    return configs.GatherKernelCall(as_pairs(a, BF16), pairs, 132, scaled=scaled)


@pytest.mark.parametrize(
    ("kind", "travels"),
    [
        pytest.param("tensor", False, id="one scale"),
        pytest.param("rows", True, marks=needs_row_wise_products, id="scales of the own rows"),
        pytest.param("rows", False, marks=needs_row_wise_products, id="scales of all rows"),
    ],
)
def test_each_rank_multiplies_all_rows(monkeypatch: pytest.MonkeyPatch, kind: str, travels: bool) -> None:
    wide = left(kind, W * M, K + 16)
    shards = [wide.numbers[r * M :][:M, 16:] if r else wide.numbers[:M, 16:].clone() for r in range(W)]
    bs, bias = [right(kind, K, 32), right(kind, K, 16)], torch.randn(32).to(BF16)
    calls = [example_of(a, [b.numbers for b in bs], kind, travels=travels) for a in shards]
    problem = calls[0].problem(W)
    gpus = Gpus(configs.copied_layout(problem), monkeypatch)
    kernels: list[Any] = [
        AllGatherProductsCopied(gpus.workspace(rank), calls[rank], [True, False]) for rank in range(W)
    ]
    meant = wide.meant[:, 16:]
    for turn in range(2):  # in the first one the rows of those after have not come
        for rank, kernel in enumerate(kernels):
            scale = wide.scale[rank * M :][:M].contiguous() if travels else wide.scale
            results = [torch.full((W * M, n), float("nan")).to(BF16) for n in (32, 16)]
            given = [shards[rank], *(b.numbers for b in bs), scale, *(b.scale for b in bs), bias]
            gpus.said.clear()
            kernel.call(given, results, 5, STREAM)
            order = [(rank + step) % W for step in range(1, W)]
            arrived = [("arrive", src, 1 if turn or src < rank else 0) for src in order]
            begins = ["fused_all_gather_scaled_matmul", "acquire", (STREAM + 1, "waits for", gpus.said[2][2])]
            assert gpus.said[:-1] == [*begins, *arrived, "leave"]
            assert gpus.said[-1][:2] == (STREAM, "waits for")
            if not turn:
                continue
            for b, result, more in zip(bs, results, (bias.double(), 0.0), strict=True):
                exact = meant @ b.meant + more
                assert (result.double() - exact).abs().max() <= 2 * ROUNDED[BF16] * exact.abs().max()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_each_rank_multiplies_all_rows_that_have_no_scales(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, returned: bool, dim: int
) -> None:
    wide = torch.randn(W * M, K + 16).to(dtype)
    shards = [wide[r * M :][:M, 16:] if r else wide[:M, 16:].clone() for r in range(W)]
    whole = torch.cat(shards, dim)
    rows, deep = whole.shape
    bs = [torch.randn(deep, 40).to(dtype), torch.randn(24, deep).to(dtype).t()]
    call = [configs.GatherKernelCall(a, bs, 108, split_k=dim == 1, return_A=returned) for a in shards]
    gpus = Gpus(configs.copied_layout(call[0].problem(W)), monkeypatch)
    kernels: list[Any] = [AllGatherProductsCopied(gpus.workspace(rank), call[rank]) for rank in range(W)]
    for turn in range(2):
        for rank, kernel in enumerate(kernels):
            results = [torch.full((rows, n), float("nan")).to(dtype) for n in (40, 24, *[deep] * returned)]
            gpus.said.clear()
            kernel.call([shards[rank], *bs], results, 5, STREAM)
            assert gpus.said[0] == "fused_all_gather_matmul" and gpus.said[-2] == "leave"
            if not turn:  # the rows of those after have not come
                continue
            for b, result in zip(bs, results, strict=False):
                exact = whole.double() @ b.double()
                assert (result.double() - exact).abs().max() <= 2 * ROUNDED[dtype] * exact.abs().max()
            if returned:
                assert torch.equal(results[-1], whole)


N = 24
PLAIN = Epilogue(BF16)
ADDED = Epilogue(BF16, average=True, bias=True, residual=True)


def test_between_two_ranks_long_parts_are_cut() -> None:
    cuts = copied_products._cuts
    assert cuts(1, 1023, 2) == [slice(1023)] and cuts(2, 4096, 2) == cuts(1, 4096, 3) == [slice(4096)]
    assert cuts(1, 1025, 2) == [slice(512), slice(512, 1025)]


def parts_of(form: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A as the kernels take it, B, and the product as parts [W, L, m, N]; of whole numbers, in any order exact."""
    b = torch.randint(-3, 4, (K, N * (W if form == "columns" else 1))).to(dtype)
    if form == "columns":
        a = torch.randint(-3, 4, (1, 1, M, K)).to(dtype)
        return a, b, (a[0, 0].double() @ b.double()).unflatten(1, (W, N)).movedim(1, 0).unsqueeze(1)
    a = torch.randint(-3, 4, (2 if form == "batches" else 1, W, M, K + 16)).to(dtype)[..., 16:]
    return a, b.t().contiguous().t(), (a.double() @ b.double()).movedim(1, 0)


@pytest.mark.parametrize("form", ["rows", "rows that are cut", "batches", "columns"])
@pytest.mark.parametrize(
    "epilogue",
    [PLAIN, ADDED, replace(PLAIN, out_dtype=torch.float32), replace(PLAIN, residual=True)],
    ids=["sum", "average with terms", "float32", "residual"],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_each_rank_adds_up_its_part(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, epilogue: Epilogue, form: str
) -> None:
    if epilogue.out_dtype == BF16:
        epilogue = replace(epilogue, out_dtype=dtype)
    cuts = 2 if form == "rows that are cut" else 1
    if cuts == 2:
        monkeypatch.setattr(copied_products, "_cuts", lambda *_: [slice(2), slice(2, M)])
    given = [parts_of(form, dtype) for _ in range(W)]
    lead = given[0][2].shape[1]
    bias, residual = torch.randint(-9, 9, (N,)).to(dtype), torch.randint(-9, 9, (W, lead, M, N)).to(dtype)
    calls = [ScatterKernelCall(a, b, 108, epilogue, split_n=form == "columns") for a, b, _ in given]
    gpus = Gpus(scatter_configs.copied_parts_layout(calls[0].problem(W)), monkeypatch)
    kernels = [MatmulReduceScatterCopied(gpus.workspace(rank), calls[rank]) for rank in range(W)]
    for turn in range(2):  # in the first one the parts of those after have not come
        for rank, kernel in enumerate(kernels):
            terms = [bias] * epilogue.bias + [residual[rank]] * epilogue.residual
            out = torch.full((lead, M, N), float("nan"), dtype=epilogue.out_dtype)
            gpus.said.clear()
            kernel.call([*given[rank][:2], *terms], [out], 5, STREAM)
            sent, (op, begins, *said, ends, joined) = (STREAM + 1, "waits for"), gpus.said
            assert (op, begins, ends) == ("fused_matmul_reduce_scatter", "acquire", "leave")
            waits = 1 + (W - 1) * cuts  # copies come after the acquire kernel, and each after its product
            assert [x[:2] for x in said[:waits]] == [sent] * waits
            assert [x[:2] for x in said[waits:]] == [("arrive", (rank + step) % W) for step in range(1, W)]
            assert joined[:2] == (STREAM, "waits for")
            if not turn:
                continue
            total = torch.stack([parts[rank] for _, _, parts in given]).sum(0)
            exact = sum((term.double() for term in terms), start=total / (W if epilogue.average else 1))
            if epilogue.average:  # thirds are no numbers of float32
                assert (out.double() - exact).abs().max() <= 2 * ROUNDED[dtype] * exact.abs().max()
            else:
                assert torch.equal(out, exact.to(out.dtype))


def test_a_product_that_fails_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, _ = parts_of("rows", BF16)
    call = ScatterKernelCall(a, b, 108, PLAIN)
    gpus = Gpus(scatter_configs.copied_parts_layout(call.problem(W)), monkeypatch)
    kernel = MatmulReduceScatterCopied(gpus.workspace(0), call)
    with pytest.raises(RuntimeError):
        kernel.call([a, b[1:]], [torch.empty(1, M, N, dtype=BF16)], 5, STREAM)
    assert isinstance(gpus.said[-1], RuntimeError)
    with pytest.raises(ValueError, match=r"workspace: is .*, must hold "):
        MatmulReduceScatterCopied(gpus.workspace(0), replace(call, a=torch.cat([a, a], 2)))


def test_an_error_on_the_way_breaks_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = left("tensor", M, K), right("tensor", K, 32)
    call = example_of(a.numbers, [b.numbers], "tensor", travels=False)
    gpus = Gpus(configs.copied_layout(call.problem(W)), monkeypatch)
    kernel: Any = AllGatherProductsCopied(gpus.workspace(0), call, [False])
    wrong = torch.empty(W * M, 32)  # of another dtype than the products
    with pytest.raises((RuntimeError, ValueError), match="dtype"):
        kernel.call([a.numbers, b.numbers, a.scale, b.scale], [wrong], 5, STREAM)
    assert isinstance(gpus.said[-1], (RuntimeError, ValueError))


def test_a_workspace_that_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    call = example_of(left("rows", M, K).numbers, [right("rows", K, 32).numbers], "rows", travels=True)
    gpus = Gpus(Layout(W, 1, W * M * K), monkeypatch)
    with pytest.raises(ValueError, match=r"workspace: is .*, must hold "):
        AllGatherProductsCopied(gpus.workspace(0), call, [False])


def problem_of(m: int, n: int, k: int, scaled: ScaledProducts, world_size: int = 2) -> Any:
    return configs.AllGatherMatmulProblem(m, (n,), k // 2, world_size, 132, spec=H100, scaled=scaled)


ROWS = ScaledProducts((E4M3, E4M3), ScaleKind.ROWS, BF16, promote=False, travels=True)


@pytest.mark.parametrize("m", [2048, 4096, 8192])
def test_long_row_wise_products_are_torchs(m: int) -> None:
    _, chosen = configs.rank_gather_kernels(problem_of(m, 14336, 4096, ROWS))[0]
    assert isinstance(chosen, configs.CopiedConfig)


@pytest.mark.parametrize("m", [64, 256])
def test_few_rows_are_not_sent_by_copy_engines(m: int) -> None:
    _, chosen = configs.rank_gather_kernels(problem_of(m, 14336, 4096, ROWS))[0]
    assert not isinstance(chosen, configs.CopiedConfig)


def test_what_copy_engines_do_not_take() -> None:
    problem = problem_of(4096, 14336, 4096, ROWS)
    assert configs.choose_copied_gather(problem) is not None
    of_16_bits = replace(problem, scaled=None, spec=replace(H100, has_gemm=False))
    assert configs.choose_copied_gather(of_16_bits) is not None
    assert configs.choose_copied_gather(replace(of_16_bits, return_A=True)) is not None
    of_float32 = replace(problem, scaled=None, itemsize=4)
    assert configs.choose_copied_gather(of_float32) is not None
    assert configs.choose_copied_gather(replace(of_float32, split_k=True)) is not None
    assert configs.choose_copied_gather(replace(of_16_bits, split_k=True)) is not None
    assert configs.choose_copied_gather(replace(problem, scaled=None, copies=True)) is not None
    others = [
        replace(problem, scaled=None),
        replace(problem, split_k=True),
        replace(problem, return_A=True),
        replace(problem, scaled=replace(ROWS, kind=ScaleKind.BLOCKS, torch_has_blocks=True)),
        replace(problem, scaled=replace(ROWS, out_dtype=torch.float16)),  # torch has no kernel
    ]
    assert [configs.choose_copied_gather(other) for other in others] == [None] * len(others)
