"""The products of fp8 operands on the CPU (matmul_ops.py): which scales a tile gets, and when they have come.

Numbers are small and whole, scales are powers of two: sums are exact.
"""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import dataclass

import pytest
import torch
from fibers import Library, drawn_seed, mistakes
from matmul_ops import push, result, uses, wrong
from matmuls import BROAD, SMALL, WIDE, Matmuls, build
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import cuda_kernel as gather
from weft.kernels.all_gather_matmul import scaled as scaled_gather
from weft.kernels.device.gemm.gemm_tiles import Tile
from weft.kernels.device.gemm.scaling import ScaledProducts, ScaleKind
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import cuda_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TENSOR, ROWS, BLOCKS = ScaleKind
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def powers(*shape: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-2, 3, shape).float())


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).float()


def pairs(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype).view(torch.bfloat16)


def scales_of_A(kind: ScaleKind, m: int, k: int) -> torch.Tensor:
    return powers(*{TENSOR: (1, 1), ROWS: (1, m), BLOCKS: (-(-k // 128), m)}[kind])


def scales_of_B(kind: ScaleKind, k: int, n: int) -> torch.Tensor:
    return powers(*{TENSOR: (1, 1), ROWS: (1, n), BLOCKS: (-(-k // 128), -(-n // 128))}[kind])


def meant(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [m, K] by scales [S, m]."""
    every = scales.t().repeat_interleave(128, 1)[:, : numbers.shape[1]] if scales.shape[0] > 1 else scales.t()
    return numbers * every


def meant_B(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Rows [N, K] by scales of B [K, N]."""
    n, k = numbers.shape
    if scales.shape[1] in (1, n) and scales.shape[0] == 1:
        return numbers * scales.t()
    return numbers * scales.repeat_interleave(128, 0)[:k].repeat_interleave(128, 1)[:, :n].t()


@dataclass
class ScaledGather:
    """all_gather(A) @ [B, ...] of fp8 numbers, ``k`` of a row."""

    size: int
    m: int
    ns: tuple[int, ...]
    k: int
    products: ScaledProducts
    tile: Tile = SMALL
    comm_sms: int = 0
    split_k: bool = False
    return_A: bool = False
    blocks: int = 4

    def __post_init__(self) -> None:
        config = push(self.tile, self.comm_sms, 1, 128, self.split_k)
        self.config = gather_configs.replace(config, scaled=self.products)

    def call(self, a: torch.Tensor, bs: list[torch.Tensor]) -> gather_configs.GatherKernelCall:
        types = self.products.types
        return gather_configs.GatherKernelCall(
            *(pairs(a, types[0]), [pairs(b, types[1]).t() for b in bs], self.blocks, self.split_k),
            return_A=self.return_A,
            scaled=self.products,
        )

    def operands(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        k = self.k * (self.size if self.split_k else 1)
        return whole(self.m, self.k), [whole(n, k) for n in self.ns]

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        call = self.call(*self.operands())
        defines = gather.gather_defines(call.bs, self.config, return_A=self.return_A)
        return build(gather.SOURCE, scaled_gather._ScaledParams, defines, instead)

    def scales(self, a: torch.Tensor) -> gather_configs.GatherScales:
        kind = self.products.kind
        return gather_configs.GatherScales(
            a=a,
            bs=[scales_of_B(kind, self.k, n) for n in self.ns],
            biases=[whole(n).bfloat16() if i == 0 else None for i, n in enumerate(self.ns)],
        )

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Matmuls:
        layout = gather_configs.gather_push_layout(self.m, self.k // 2, self.size, self.config)
        self.ranks = Matmuls(monkeypatch, library, layout, pace)
        call = self.call(*self.operands())
        scales = self.scales(scales_of_A(self.products.kind, self.m, self.k))
        self.kernels = [
            scaled_gather.AllGatherScaledMatmulPush(place, call, scales, self.config)
            for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, buffer: int, polls: int) -> None:
        products, kind = self.products, self.products.kind
        shards = [whole(self.m, self.k) for _ in self.kernels]
        scales = [scales_of_A(kind, self.m, self.k) for _ in self.kernels]
        if kind is TENSOR:
            scales = [scales[0]] * self.size
        of_all = torch.cat(scales, 0)  # of all ranks' rows, if they do not travel
        for rank, kernel in enumerate(self.kernels):
            bs = self.operands()[1]
            call = self.call(shards[rank], bs)
            given = self.scales(scales[rank] if products.travels or kind is TENSOR else of_all)
            scaled = [meant(x, s) for x, s in zip(shards, scales, strict=True)]
            A = torch.cat(scaled, 1) if self.split_k else torch.cat(scaled)
            wants = []
            for b, scale, bias in zip(bs, given.bs, given.biases, strict=True):
                want = A.double() @ meant_B(b, scale).t().double()
                wants.append(result((want + (0 if bias is None else bias)).to(products.out_dtype)))
            if self.return_A:
                wants.append(result(pairs(torch.cat(shards), products.types[0])))
            operands = [x.data_ptr() for x in (call.a, *call.bs, *given.tensors)]
            kernel.launch(buffer, operands, [c.data_ptr() for c, _ in wants], polls, rank)
            self.kept += [call, given]
            self.wanted += wants


@dataclass
class ScaledScatter:
    """reduce_scatter(A @ B) of fp8 numbers."""

    size: int
    m: int
    n: int
    k: int
    products: ScaledProducts
    tile: Tile = SMALL
    batches: int = 1
    split_n: bool = False
    average: bool = False
    blocks: int = 4

    def __post_init__(self) -> None:
        self.epilogue = Epilogue(self.products.out_dtype, self.average)
        self.config = scatter_configs.ScatterPushConfig(self.tile, 2, self.split_n, self.products)

    @property
    def parts(self) -> int:
        return 1 if self.split_n else self.size

    def call(self, a: torch.Tensor, b: torch.Tensor) -> scatter_configs.ScatterKernelCall:
        types = self.products.types
        shaped = pairs(a, types[0]).view(self.batches, self.parts, self.m, self.k // 2)
        return scatter_configs.ScatterKernelCall(
            *(shaped, pairs(b, types[1]).t(), self.blocks, self.epilogue),
            split_n=self.split_n,
            scaled=self.products,
        )

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        columns = self.n * (self.size if self.split_n else 1)
        return whole(self.batches * self.parts * self.m, self.k), whole(columns, self.k)

    def compiled(self, instead: tuple[str, str] | None = None) -> Future[Library]:
        of_one = pairs(whole(self.n, self.k), self.products.types[1]).t()
        defines = scatter.scatter_defines(of_one, self.config, self.size, 0, self.epilogue)
        return build(scatter.SOURCE, scatter._ScaledParams, defines, instead)

    def scales(self, bias: bool) -> list[torch.Tensor]:
        """Of A, of B, and maybe a bias."""
        (a, b), kind = self.operands(), self.products.kind
        found = [scales_of_A(kind, a.shape[0], self.k), scales_of_B(kind, self.k, b.shape[0])]
        return [*found, whole(b.shape[0]).bfloat16()] if bias else found

    def prepare(self, monkeypatch: pytest.MonkeyPatch, library: Library, pace: tuple[int, int]) -> Matmuls:
        problem = scatter_configs.MatmulReduceScatterProblem(
            *(self.m, self.n, self.k // 2, self.size, self.blocks, self.batches, self.split_n),
            scaled=self.products,
        )
        layout = scatter_configs.scatter_push_layout(self.config, problem)
        self.ranks = Matmuls(monkeypatch, library, layout, pace)
        call = self.call(*self.operands())
        strides = self.scales(False)[1].stride()
        self.kernels = [
            scatter.ScaledMatmulReduceScatterPush(place, call, strides, self.config)
            for place in self.ranks.places
        ]
        self.kept: list[object] = []
        self.wanted: list[tuple[torch.Tensor, torch.Tensor]] = []
        return self.ranks

    def launch(self, buffer: int, polls: int) -> None:
        biased = self.products.out_dtype != torch.float32
        every = [(*self.operands(), self.scales(biased and rank == 0)) for rank in range(self.size)]
        partials = []
        for a, b, scales in every:
            of_a, of_b, *bias = scales
            partial = meant(a, of_a) @ meant_B(b, of_b).t()
            partial = partial + bias[0] if bias else partial
            shape = self.batches, self.parts, self.m, partial.shape[1]
            partials.append(torch.cat(partial.view(shape).chunk(self.size, -1 if self.split_n else 1), 1))
        for rank, kernel in enumerate(self.kernels):
            a, b, scales = every[rank]
            call = self.call(a, b)
            total = torch.zeros(())
            for src, partial in enumerate(partials):
                part = partial[:, rank]
                total = total + (part if src == rank else part.to(self.products.out_dtype).float())
            total = total / self.size if self.average else total
            out, want = result(total.to(self.products.out_dtype))
            operands = [x.data_ptr() for x in (call.a, call.b, *scales)]
            kernel.launch(buffer, operands, [out.data_ptr()], polls, rank)
            self.wanted.append((out, want))
            self.kept += [call, scales, out]


def products(
    kind: ScaleKind,
    *,
    promote: bool,
    travels: bool = False,
    types: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3),
    out: torch.dtype = torch.bfloat16,
) -> ScaledProducts:
    return ScaledProducts(types, kind, out, promote, travels)


OPS = {
    "gather-tensor": ScaledGather(2, 147, (80, 48), 400, products(TENSOR, promote=False)),
    "gather-rows": ScaledGather(
        *(3, 147, (80, 48), 400, products(ROWS, promote=False, travels=True, types=(E5M2, E4M3))), comm_sms=2
    ),
    "gather-rows-promoted": ScaledGather(
        *(2, 147, (48,), 416, products(ROWS, promote=True, travels=True), WIDE), blocks=2
    ),
    "gather-rows-of-all": ScaledGather(2, 147, (80,), 144, products(ROWS, promote=True)),
    "gather-blocks": ScaledGather(
        *(3, 147, (80, 144), 400, products(BLOCKS, promote=True, travels=True)), comm_sms=2
    ),
    "gather-blocks-returned": ScaledGather(
        *(2, 147, (272,), 272, products(BLOCKS, promote=True, travels=True, types=(E4M3, E5M2)), BROAD),
        return_A=True,
    ),
    "gather-split": ScaledGather(3, 147, (80,), 144, products(TENSOR, promote=True), split_k=True),
    "scatter-tensor": ScaledScatter(2, 147, 80, 400, products(TENSOR, promote=False)),
    "scatter-rows": ScaledScatter(
        *(3, 67, 80, 144, products(ROWS, promote=False, types=(E4M3, E5M2)), WIDE), average=True, blocks=2
    ),
    "scatter-rows-batches": ScaledScatter(2, 33, 80, 144, products(ROWS, promote=True), batches=3),
    "scatter-rows-columns": ScaledScatter(3, 147, 80, 144, products(ROWS, promote=True), split_n=True),
    "scatter-float32": ScaledScatter(
        *(2, 147, 80, 400, products(ROWS, promote=False, out=torch.float32)), average=True
    ),
    "scatter-float32-4": ScaledScatter(
        *(4, 67, 80, 272, products(TENSOR, promote=True, out=torch.float32), WIDE), blocks=2
    ),
    "scatter-float32-columns": ScaledScatter(
        *(3, 67, 128, 272, products(BLOCKS, promote=True, out=torch.float32)), split_n=True
    ),
    "scatter-blocks": ScaledScatter(2, 147, 208, 400, products(BLOCKS, promote=True), BROAD),
    "scatter-blocks-batches": ScaledScatter(
        4, 33, 208, 272, products(BLOCKS, promote=True), batches=2, blocks=2
    ),
    "scatter-blocks-columns": ScaledScatter(2, 67, 128, 272, products(BLOCKS, promote=True), split_n=True),
}


@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_epochs_of_both_buffers_scaled(
    op: ScaledGather | ScaledScatter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = drawn_seed()
    assert not wrong(op, uses(op, monkeypatch, op.compiled().result(), seed, count=4))


@pytest.mark.parametrize(
    ("name", "instead"),
    mistakes(
        [
            # Nothing orders what is sent before its flags.
            (
                "gather-rows",
                (
                    "        __threadfence_system();\n        if (!more) continue;",
                    "        if (!more) continue;",
                ),
            ),
            ("gather-blocks", ("p.blocks + block) * p.m + row", "p.blocks) * p.m + row")),
            (
                "gather-blocks",
                ("scales.load(factors[1 - set], i + 2, depth)", "scales.load(factors[1 - set], i, depth)"),
            ),
            ("gather-rows-of-all", ("p.scales + static_cast<u64>(t.src) * p.of_blocks", "p.scales")),
            ("gather-tensor", ("(words[i], sums + 4 * (j + i) + 2)", "v[2] += pair[1]")),
            ("scatter-rows", ("lower = __ldcg(t.of_row(first + 8))", "lower = __ldcg(t.of_row(first))")),
            ("gather-rows", ("lane = j % 8 * 4 + threadIdx.x % 4", "lane = j % 8 * 4")),
            ("scatter-blocks-columns", ("first = SPLIT_N ? p.n * t.dst : 0", "first = 0")),
            ("scatter-rows-batches", ("t.batch * WORLD_SIZE + t.dst, parts", "t.dst, parts")),
            ("scatter-float32", ("sums + weft::PART_ELEMENTS * (first + i)", "sums + 8 * (first + i)")),
        ],
        5,
    ),
)
def test_mistakes_are_found(name: str, instead: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    op, library = OPS[name], OPS[name].compiled(instead).result()
    assert any(wrong(op, uses(op, monkeypatch, library, seed, count=4)) for seed in range(10))
