"""The table of kernels: what it says of files and results; and each .cu compiled for all architectures of its row."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import test_cuda_compile
import torch
import weft
from cubins import KERNELS as FOLDER
from cubins import compiled, usage
from weft.kernels.all_reduce import cuda_kernel as all_reduce
from weft.kernels.all_reduce_rms_norm import configs, cuda_kernel
from weft.kernels.all_reduce_rms_norm.configs import CLUSTERS, most_vectors
from weft.kernels.device import capability
from weft.kernels.device.capability import ALL, ARCHS, HOPPER, KERNELS, why_no_kernel_on
from weft.kernels.device.jit.program import Program, compile_cubin
from weft.symm_mem.backends import cuda_state

ROOT = Path(weft.__file__).resolve().parent
GPU = torch.device("cuda", 0)
# One of each kind of each file; between two ranks, where a file takes the least time.
SMALL = {
    "all_gather/kernel.cu": "alone_gather-2-bytes",
    "all_gather_matmul/one_shot.cu": "gather-4",
    "all_reduce/kernel.cu": "all_reduce-2-float32-sum",
    "all_reduce_rms_norm/kernel.cu": "norm-2-bfloat16-1-2",
    "all_reduce_rms_norm/quant.cuh": "norm-2-static-all-1",
    "all_to_all/kernel.cu": "all_to_all-2-bytes",
    "async_collectives/kernel.cu": "async-2",
    "device/comm/acquire.cu": "acquire",
    "float8_cast/kernel.cu": "cast-torch.bfloat16-torch.float8_e4m3fn",
    "grouped_matmul/take_rows.cu": "take",
    "matmul_all_reduce/kernel.cu": "few_rows-2-bfloat16-sum-4096-True",
    "matmul_reduce_scatter/one_shot.cu": "scatter-2-rounded",
    "moe_dispatch/kernel.cu": "moe-2-bfloat16-8",
    "moe_route/kernel.cu": "route-torch.int32",
    "reduce_scatter/kernel.cu": "alone_scatter-2-float32-sum",
    "transfer/kernel.cu": "transfer",
}
BUILDS = [(kernel, ARCHS[of]) for kernel in SMALL for of in KERNELS[kernel].archs if of != HOPPER]


def built(kernel: str, arch: str) -> Program:
    program = test_cuda_compile.PROGRAMS[SMALL[kernel]]
    return Program(program.path, arch, program.defines)


@pytest.fixture(scope="module", autouse=True)
def compiled_ahead(request: pytest.FixtureRequest) -> None:
    for item in request.session.items:
        if item.path == request.path and hasattr(item, "callspec") and "arch" in item.callspec.params:
            compiled(built(item.callspec.params["kernel"], item.callspec.params["arch"]))


def test_every_file_of_kernels_has_a_row() -> None:
    files = {*FOLDER.rglob("*.cu"), *FOLDER.rglob("triton_kernel.py")}
    named = {FOLDER / name for name in KERNELS}
    assert files <= named and all(file.is_file() for file in named)


def test_what_was_run_is_in_the_results() -> None:
    """Sanitizer runs are of all kernels, and say no dates of their own."""
    for name, row in KERNELS.items():
        if not row.ran:
            continue
        text = (ROOT / "bench" / "results" / row.results).read_text()
        assert row.date in text, name
        assert row.cards.split()[-1] in text, name


def test_all_without_wgmma_are_compiled_here() -> None:
    for name, row in KERNELS.items():
        if name.endswith((".cu", ".cuh")) and "wgmma" not in row.needs:
            assert name in SMALL


@pytest.mark.parametrize(("kernel", "arch"), BUILDS)
def test_compiles_without_spills(kernel: str, arch: str, tmp_path: Path) -> None:
    found = dict(usage(built(kernel, arch), tmp_path))
    kinds, _ = test_cuda_compile.KINDS[SMALL[kernel].split("-")[0]]
    assert set(found) == kinds
    for name, numbers in found.items():
        assert numbers["STACK"] == numbers["LOCAL"] == 0, f"{name} spills or indexes an array: {numbers}"
        # 65536 registers are those of an SM, 512 threads the largest block.
        assert numbers["REG"] <= 128


def test_no_clusters_before_hopper() -> None:
    program = test_cuda_compile.PROGRAMS["norm-4-bfloat16-4-2"]
    with pytest.raises(Exception, match="CLUSTER: must be 1 before Hopper"):
        compile_cubin(program.path, "sm_80", program.defines)
    for world_size in (2, 4, 8):
        for vectors in (1, 33, most_vectors(world_size, 1)):
            config = configs.choose_all_reduce_rms_norm(64, vectors, world_size, 108, 1)
            assert config.cluster == 1 and config.blocks <= 108
    longest = most_vectors(2, 1) * 8
    assert cuda_kernel.why_no_norm_kernel(longest, torch.bfloat16, 2, 1) is None
    assert "longer than" in str(cuda_kernel.why_no_norm_kernel(longest + 8, torch.bfloat16, 2, 1))
    assert cuda_kernel.why_no_norm_kernel(longest + 8, torch.bfloat16, 2, CLUSTERS[-1]) is None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[cuda_state.CudaState]:
    made = cuda_state.CudaState()
    monkeypatch.setattr(cuda_state, "state", made)
    monkeypatch.delenv("WEFT_ARCH", raising=False)
    monkeypatch.delenv("WEFT_UNTESTED", raising=False)
    capability.simulated_capability.cache_clear()
    yield made
    capability.simulated_capability.cache_clear()


@pytest.mark.parametrize("of", ALL)
def test_kernels_that_were_never_run_are_asked_for(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, of: tuple[int, int]
) -> None:
    gpu.capability = lambda device: of
    assert why_no_kernel_on("all_reduce", torch.device("cpu")) is None
    why = why_no_kernel_on("all_reduce", GPU)
    assert capability.is_untested(GPU) == (of != HOPPER)
    if of == HOPPER:
        assert why is None
    else:
        assert why == (
            f"its kernels compile for {ARCHS[of]}, but were never run there: WEFT_UNTESTED=1 takes them"
        )
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    assert why_no_kernel_on("all_reduce", GPU) is None
    for name, row in KERNELS.items():
        assert capability.runs_on(name, GPU) == (of in row.archs)
    monkeypatch.setenv("WEFT_UNTESTED", "yes")
    if of != HOPPER:
        with pytest.raises(ValueError, match="WEFT_UNTESTED: is 'yes', must be 0 or 1"):
            why_no_kernel_on("all_reduce", GPU)


def test_other_gpus_run_none(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    gpu.capability = lambda device: (7, 5)
    assert why_no_kernel_on("all_reduce", GPU) == (
        "its kernels are for GPUs of compute capability 8.0 or 8.6 or 8.9 or 9.0 or 10.0 or 10.3 or 12.0"
    )
    assert not capability.is_untested(GPU) and not any(capability.runs_on(name, GPU) for name in KERNELS)
    with pytest.raises(ValueError, match=r"device: cuda:0 has compute capability 7\.5, must have 8\.0 or"):
        capability.arch_of(GPU)


def test_programs_are_compiled_for_the_device(gpu: Any) -> None:
    program = Program(Path("kernel.cu"))
    assert program.arch == "sm_90a"  # of a GPU that is not there
    gpu.capability = lambda device: (8, 6)
    assert program.arch == "sm_86" and Program(Path("kernel.cu"), "sm_120a").arch == "sm_120a"


def test_a_later_gpu_in_place_of_another(gpu: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("WEFT_ARCH", "80")
    assert capability.capability_of(GPU) == (8, 0) and capability.arch_of(GPU) == "compute_80"
    assert capability.is_untested(GPU) and not capability.has_clusters(GPU)
    source = tmp_path / "kernel.cu"
    source.write_text('extern "C" __global__ void kernel(int* out) { *out = __CUDA_ARCH__; }\n')
    ptx = Program(source).cubin().decode()
    assert re.search(r"^\.target sm_80$", ptx, re.MULTILINE) and "st.global.u32" in ptx.replace(
        ".b32", ".u32"
    )
    assert ptx.endswith("\0")  # the driver reads text up to it
    capability.simulated_capability.cache_clear()
    monkeypatch.setenv("WEFT_ARCH", "90")
    with pytest.raises(ValueError, match="WEFT_ARCH: is '90', must be one of 80, 86, 89"):
        capability.capability_of(GPU)


@pytest.mark.parametrize("of", [(8, 0), HOPPER])
def test_dependent_launches_begin_with_hopper(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, of: tuple[int, int]
) -> None:
    from cuda.bindings import driver
    from weft.kernels.device.jit.program import Function

    asked: list[str] = []
    done = (driver.CUresult.CUDA_SUCCESS,)
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: asked.append("plain") or done)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: asked.append("dependent") or done)
    gpu.capability = lambda device: of
    Function("kernel", driver.CUfunction(0)).bound(1, 32, (ctypes.c_uint64 * 1)(), dependent=True)(0)
    assert asked == ["dependent" if of == HOPPER else "plain"]


def test_nothing_of_hopper_is_left_where_there_is_none() -> None:
    program = all_reduce.all_reduce_program(2, 1, torch.float32, "sum")
    early = program.defines | {"DEPENDENT": 1}
    assert "griddepcontrol" not in compile_cubin(program.path, "compute_80", early).decode()
