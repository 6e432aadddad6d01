"""The products whose sums are in tensor memory, on the CPU (tensor_memory.h): as sm_100a has them."""

from __future__ import annotations

import shutil
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch
from fibers import Library, drawn_seed, mistakes
from matmul_ops import ROUNDED, Gather, Op, Scatter, push, uses, wrong
from matmuls import build
from weft.kernels.all_gather_matmul import cuda_kernel as gather
from weft.kernels.device.gemm.gemm_tiles import Tile
from weft.kernels.matmul_reduce_scatter import cuda_kernel as scatter
from weft.kernels.matmul_reduce_scatter.configs import Epilogue
from weft.symm_mem.backends import cuda_state

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
TILE, BROAD = Tile(128, 128, 2, 0.0), Tile(128, 192, 2, 0.0)
EVERY = Epilogue(torch.float32, average=True, bias=True, residual=True)
OPS: dict[str, Op] = {
    "gather": Gather(2, 147, (136, 40), 200, push(TILE, 0, 1)),
    "gather-rows": Gather(2, 147, (192,), 136, push(BROAD, 2, 1), rows=True),
    "gather-odd-rows": Gather(2, 130, (200,), 72, push(BROAD, 0, 1), rows=True),
    "many-tiles": Gather(2, 300, (136, 40), 72, push(TILE, 0, 1), blocks=2),
    "returned": Gather(3, 147, (136,), 136, push(TILE, 0, 1), blocks=2, return_A=True),
    "split": Gather(2, 147, (136,), 136, push(TILE, 0, 1, split_k=True), blocks=2),
    "scatter": Scatter(2, 147, 136, 200, TILE, raster_group=2),
    "terms": Scatter(3, 67, 136, 72, TILE, blocks=2, epilogue=replace(ROUNDED, bias=True, residual=True)),
    "float32": Scatter(2, 147, 200, 72, BROAD, blocks=2, rows=True, epilogue=EVERY),
    "columns": Scatter(2, 147, 72, 136, TILE, blocks=2, split_n=True),
    "to-all": Scatter(2, 275, 136, 72, TILE, blocks=2, epilogue=replace(ROUNDED, to_all=True)),
}
LOADED = "    tensor_loads_done(sums);\n    order_before_sync();\n    __syncwarp();\n"
TAKEN = "    if (threadIdx.x % 32 == 0) arrive_at(all.taken + state.at, s.block);\n"
#: With the op that sees it.
MISTAKES = {
    "accumulator-not-taken": (
        "many-tiles",
        "wait(all.taken + state.at, state.parity ^ 1);\n        const u32 sums",
        "const u32 sums",
    ),
    "sums-not-awaited": ("gather", "wait(all.summed + state.at, state.parity);", ""),
    "loads-not-awaited": ("gather", f"{LOADED}{TAKEN}", f"{TAKEN}{LOADED}"),
    "stage-not-awaited": ("gather", "wait(s.full + stages.at, stages.parity);", ""),
    "stage-of-one-block": (
        "gather",
        "arrive_after_products_at_both(s.empty + stages.at)",
        "arrive_after_products(s.empty + stages.at)",
    ),
    "one-accumulator": ("many-tiles", "+ state.at * BN + warpgroup * WN", "+ warpgroup * WN"),
    "other-half": ("gather", "+ warpgroup * WN;", "+ (1 - warpgroup) * WN;"),
    "other-lanes": ("gather", "threadIdx.x % GROUP / 32 * 32;", "0;"),
    "first-product-added": ("split", "INSTRUCTION, i + k)", "INSTRUCTION, 1)"),
    "rows-as-columns": ("gather-rows", "B_ROWS ? 4096 : 0, 1024", "B_ROWS ? 1024 : 0, 4096"),
    "other-half-of-k": ("gather-rows", "k / 2 * (B_BYTES / 2) + k % 2 * 2048", "k * 2048"),
    "n-not-contiguous": ("gather-rows", "PRODUCT_TYPE[0] == 'b', B_ROWS)", "PRODUCT_TYPE[0] == 'b', 0)"),
    "memory-kept": (
        "gather",
        "free_tensor_memory<TENSOR_COLUMNS>(*all.address);",
        "free_tensor_memory<TENSOR_COLUMNS>(0);",
    ),
    "lower-rows-returned": ("returned", "lower.begin(i, stage + A_BYTES / 2);", "lower.begin(i, stage);"),
    "vectors-traded": (
        "scatter",
        "make_uint4(words[4], words[5], words[6], words[7])",
        "make_uint4(words[5], words[4], words[6], words[7])",
    ),
}


def library_of(op: Op, instead: tuple[str, str] | None = None) -> Future[Library]:
    """For sm_100a."""
    if isinstance(op, Gather):
        of_a = gather.gather_defines(op.bs(), op.config, return_A=op.return_A)
        return build(gather.SOURCE, gather._Params, {**of_a, "__CUDA_ARCH__": 1000}, instead)
    defines = scatter.scatter_defines(op.columns(of_all=False), op.config, op.size, 0, op.epilogue)
    return build(scatter.SOURCE, scatter._Params, {**defines, "__CUDA_ARCH__": 1000}, instead)


@pytest.fixture(autouse=True)
def on_blackwell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_state.CudaState, "capability", lambda self, device: (10, 0))


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    """What the tests to come need is compiled while those before them run."""
    for item in request.session.items:
        if item.path == request.path and "name" in item.callspec.params:
            library_of(OPS[item.callspec.params["name"]])


@pytest.mark.parametrize("name", OPS)
def test_epochs_of_both_buffers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seed = drawn_seed()
    op = OPS[name]
    paces = [(store, rank) for store in (1, 3, 10) for rank in (2000, 200_000)]
    assert not wrong(op, uses(op, monkeypatch, library_of(op).result(), seed, count=3, paces=paces))


@pytest.mark.parametrize("mistake", mistakes(MISTAKES, 5))
def test_mistakes_are_found(mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, *instead = MISTAKES[mistake]
    op, library = OPS[name], library_of(OPS[name], (instead[0], instead[1])).result()

    def is_found(seed: int) -> bool:
        try:
            return bool(
                wrong(op, uses(op, monkeypatch, library, seed, count=3, paces=[(1, 2000), (10, 2000)]))
            )
        except AssertionError as e:
            return "a launch does not end" in str(e)

    assert any(is_found(seed) for seed in range(20))
