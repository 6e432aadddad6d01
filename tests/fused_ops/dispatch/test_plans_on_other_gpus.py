"""Plans on GPUs that are no Hopper and need not be there: what runs on which kernel, and why the rest runs unfused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_planned_calls import BF16, calls, on_gpu
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft import fused_ops
from weft.fused_ops import Plan, plan
from weft.fused_ops.dispatch.profitability import OPS, FusionCandidate, expected_gain, why_not_profitable
from weft.kernels.all_gather_matmul import on_cuda as gathers
from weft.kernels.device.capability import ARCHS, HOPPER
from weft.kernels.device.device_spec import device_spec_of
from weft.kernels.device.gemm.gemm_tiles import suited
from weft.kernels.matmul_reduce_scatter import on_cuda as scatters
from weft.symm_mem.backends import cuda_state
from weft.symm_mem.heap.registry import _heaps, register_heap

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="of a GPU that is there there is more to say"
)
A100, L40S, B200 = (8, 0), (8, 9), (10, 0)
COLLECTIVES = (
    *(
        "one_shot_all_reduce",
        "one_shot_all_reduce_",
        "one_shot_all_gather",
        "one_shot_reduce_scatter",
        "one_shot_all_to_all",
    ),
    *("fused_all_reduce_rms_norm", "fused_all_reduce_layer_norm"),
)


def _forget() -> None:
    device_spec_of.cache_clear()
    gathers.choose_gather_kernel.clear()
    scatters.choose_scatter_kernel.clear()


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[tuple[int, int]], None]]:
    """Makes GPUs of a compute capability those that are asked about; between two of them."""
    made = cuda_state.CudaState()
    monkeypatch.setattr(cuda_state, "state", made)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())

    def use(capability: tuple[int, int]) -> None:
        made.capability = lambda device: capability  # type: ignore[method-assign]
        _forget()

    yield use
    dist.destroy_process_group()
    _forget()


def plans(dtype: torch.dtype = BF16, m: int = 2048) -> dict[str, Plan]:
    found = {}
    for name, args, named in map(on_gpu, calls(2, dtype, m, 4096, 3072)):
        found[name] = plan(getattr(fused_ops, name), *args, **named)
    return found


@pytest.mark.parametrize("of", [A100, L40S, B200])
def test_nothing_runs_that_was_not_asked_for(on: Callable[..., None], of: tuple[int, int]) -> None:
    on(of)
    for name, found in plans().items():
        assert found.algorithm == "unfused", name
        fp8 = of == A100 and ("quant" in name or "scaled" in name)
        said = (
            "its kernels are for GPUs of compute capability 8.9 or" if fp8 else "WEFT_UNTESTED=1 takes them"
        )
        assert said in found.reason, (name, found.reason)
    for op in OPS:
        assert why_not_profitable(FusionCandidate(op, 8192, 8192, 4096, 2, BF16, "cuda")) is not None


@pytest.mark.parametrize("of", [A100, L40S])
def test_collectives_on_kernels_and_products_around_cublas(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, of: tuple[int, int]
) -> None:
    on(of)
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    found = plans()
    assert {found[name].algorithm for name in COLLECTIVES} == {"push"}
    assert found["fused_matmul_all_reduce"].algorithm == "two_kernels"
    assert found["fused_all_gather_matmul"].algorithm in ("one_shot", "copy_engine")
    assert found["fused_matmul_reduce_scatter"].algorithm in ("one_shot", "copy_engine")
    fp8 = {name: each for name, each in found.items() if "scaled" in name or "quant" in name}
    assert len(fp8) == 3
    for name, each in fp8.items():
        assert (each.algorithm == "unfused") == (of == A100), (name, each)
    for name, each in plans(m=64).items():
        if "matmul" in name and name not in fp8:
            assert each.algorithm in ("one_shot", "two_kernels"), (name, each)


def test_large_products(on: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    on(A100)
    found = plans(m=8192)
    assert found["fused_all_gather_matmul"].algorithm == "copy_engine"
    assert found["fused_matmul_reduce_scatter"].algorithm == "copy_engine"
    assert found["fused_matmul_all_reduce"].algorithm == "two_kernels"
    gather = FusionCandidate("all_gather_matmul", 16384, 3072, 4096, 2, BF16, "cuda")
    assert why_not_profitable(gather) is None and expected_gain(gather) > 0
    scatter = FusionCandidate("matmul_reduce_scatter", 16384, 3072, 4096, 2, BF16, "cuda")
    assert why_not_profitable(scatter) is None and expected_gain(scatter) > 0
    name, args, named = on_gpu(calls(2, BF16, 8192, 4096, 3072)[0])
    assert plan(getattr(fused_ops, name), *args, **{**named, "return_A": True}).algorithm == "copy_engine"
    group = args[-1]
    for rows, algorithm in ((8192, "copy_engine"), (1024, "one_shot")):
        x, w = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((rows, 4096), (8192, 3072)))
        given = on_gpu(("fused_all_gather_matmul", (x, [w], 1, group), {"return_A": False}))
        along_k = plan(fused_ops.fused_all_gather_matmul, *given[1], **given[2])
        assert along_k.algorithm == algorithm
        given = on_gpu(("fused_matmul_reduce_scatter", (x, w[:4096], "sum", 1, group), {}))
        along_n = plan(fused_ops.fused_matmul_reduce_scatter, *given[1], **given[2])
        assert along_n.algorithm == algorithm


@pytest.mark.parametrize("of", [A100, HOPPER])
def test_over_pcie_peers_are_served_one_after_the_other(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, of: tuple[int, int]
) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    on(of)
    heap: Any = SimpleNamespace(backend=SimpleNamespace(over_pcie=True))
    group = dist.distributed_c10d._get_default_group()
    for m, overlapped in ((16, False), (1024, True)):
        first = plans(m=m)
        register_heap(group, "cuda", 0, heap)
        found = plans(m=m)
        _heaps.clear()
        for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
            assert found[name].algorithm == ("copy_engine" if overlapped else first[name].algorithm)
            assert first[name].algorithm != "push" or of == HOPPER


def test_products_by_tcgen05(on: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    on(B200)
    spec = device_spec_of(torch.device("cuda", 0))
    assert spec.has_gemm and spec.tensor_memory
    assert not device_spec_of(torch.device("cuda", 0), scaled=True).has_gemm
    for m in (1024, 8192):
        assert {(t.block_m, t.block_n) for t in suited(m, 8192, 4096, 2, stores_only=True, spec=spec)} <= {
            (128, 128),
            (128, 192),
            (128, 256),
        }
    found = plans(m=8192)
    for name in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert found[name].algorithm == "push", found[name]
    for name, each in found.items():
        if "scaled" in name:
            assert each.algorithm != "push", each


@pytest.mark.parametrize("of", [A100, HOPPER, B200])
def test_products_of_float32(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch, of: tuple[int, int]
) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    on(of)
    for m, way in ((64, "one_shot"), (8192, "copy_engine")):
        found = plans(torch.float32, m)
        gather, scatter = found["fused_all_gather_matmul"], found["fused_matmul_reduce_scatter"]
        assert gather.algorithm == ("unfused" if m == 64 else "copy_engine") and gather.predicted_us is None
        candidate = FusionCandidate("matmul_reduce_scatter", 2 * m, 3072, 4096, 2, torch.float32, "cuda")
        assert (scatter.algorithm, scatter.predicted_us) == (way, None)
        assert why_not_profitable(candidate) is None


def test_long_rows_are_normed_without_clusters_by_torch(
    on: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    for of, hidden, algorithm in (
        (A100, 8192, "push"), (A100, 8200, "unfused"), (B200, 8200, "push"), (HOPPER, 8200, "push")
    ):  # fmt: skip
        on(of)
        x, w = (
            torch.empty(16, hidden, dtype=BF16, device="meta"),
            torch.empty(hidden, dtype=BF16, device="meta"),
        )
        name, args, _ = on_gpu(("fused_all_reduce_rms_norm", (x, x, w, 1e-5, None), {}))
        found = plan(getattr(fused_ops, name), *args)
        assert found.algorithm == algorithm, (ARCHS[of], hidden, found)
        assert found.reason == (
            "" if algorithm == "push" else f"rows of 8200 x {BF16} are longer than 16384 bytes"
        )
