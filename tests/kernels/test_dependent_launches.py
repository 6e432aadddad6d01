"""WEFT_PDL: what is asked of the driver, and that kernels then wait for the one before them, in all their forms."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from cuda.bindings import driver
from weft.kernels.all_reduce import cuda_kernel as all_reduce
from weft.kernels.all_reduce_rms_norm import cuda_kernel as norm
from weft.kernels.all_reduce_rms_norm.reference import NormKind
from weft.kernels.device.comm.ll_exchange import exchange_program
from weft.kernels.device.jit.program import Function, Program
from weft.kernels.matmul_all_reduce import cuda_kernel as few_rows
from weft.kernels.matmul_all_reduce.configs import MatmulAllReduceConfig

_B = torch.empty(8, 16, dtype=torch.bfloat16)
PROGRAMS = {
    "all_reduce": all_reduce.all_reduce_program(2, 1, torch.bfloat16, "sum"),
    "norm": exchange_program(norm.SOURCE, 1, norm.norm_defines(2, torch.bfloat16, (2, 1), NormKind(1e-6))),
    "few_rows": few_rows.few_rows_program(_B, _B, "sum", MatmulAllReduceConfig(1, 1), (2, 1)),
}


class Args(ctypes.Structure):
    _fields_ = (("number", ctypes.c_uint64),)


@pytest.mark.parametrize("dependent", [False, True])
def test_what_the_driver_is_asked_for(monkeypatch: pytest.MonkeyPatch, dependent: bool) -> None:
    asked: list[tuple[int, ...]] = []
    success = (driver.CUresult.CUDA_SUCCESS,)

    def number_at(address: int) -> int:
        place = ctypes.c_void_p.from_address(address).value
        assert place is not None
        return ctypes.c_uint64.from_address(place).value

    def plain(handle: Any, grid: int, _y: int, _z: int, block: int, *rest: Any) -> tuple[Any]:
        _, _, shared, stream, address, _ = rest
        asked.append((0, grid, block, shared, stream, number_at(address)))
        return success

    def early(config: Any, handle: Any, address: int, _: int) -> tuple[Any]:
        (attribute,) = config.attrs
        name = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        assert config.numAttrs == 1 and attribute.id == name
        allowed = attribute.value.programmaticStreamSerializationAllowed
        sizes = config.gridDimX, config.blockDimX, config.sharedMemBytes
        asked.append((allowed, *sizes, int(config.hStream), number_at(address)))
        return success

    monkeypatch.setattr(driver, "cuLaunchKernel", plain)
    monkeypatch.setattr(driver, "cuLaunchKernelEx", early)
    args = Args(5)
    launch = Function("kernel", driver.CUfunction(0)).bound(96, 512, args, 64, dependent=dependent)
    launch(7)
    args.number = 6
    launch(8)
    assert asked == [(dependent, 96, 512, 64, 7, 5), (dependent, 96, 512, 64, 8, 6)]


@pytest.mark.parametrize("dependent", [False, True])
def test_a_thread_without_a_context_gets_one(monkeypatch: pytest.MonkeyPatch, dependent: bool) -> None:
    result, current, asked = driver.CUresult, [0], list[str]()

    def launch(*_: Any) -> tuple[Any]:
        asked.append("launch")
        return (result.CUDA_SUCCESS if current[0] else result.CUDA_ERROR_INVALID_CONTEXT,)

    def set_current(context: int) -> tuple[Any]:
        asked.append("bind")
        current[0] = context
        return (result.CUDA_SUCCESS,)

    for name in ("cuLaunchKernel", "cuLaunchKernelEx"):
        monkeypatch.setattr(driver, name, launch)
    monkeypatch.setattr(driver, "cuCtxGetCurrent", lambda: (result.CUDA_SUCCESS, current[0]))
    monkeypatch.setattr(driver, "cuDeviceGet", lambda index: (result.CUDA_SUCCESS, 100 + index))
    monkeypatch.setattr(driver, "cuDevicePrimaryCtxRetain", lambda device: (result.CUDA_SUCCESS, device))
    monkeypatch.setattr(driver, "cuCtxSetCurrent", set_current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    call = Function("kernel", driver.CUfunction(0)).bound(96, 512, Args(5), 64, dependent=dependent)
    call(0)
    assert current == [103] and asked == ["launch", "bind", "launch"]
    call(0)
    assert asked == ["launch", "bind", "launch", "launch"]
    monkeypatch.setattr(driver, "cuLaunchKernel", lambda *_: (result.CUDA_ERROR_INVALID_CONTEXT,))
    monkeypatch.setattr(driver, "cuLaunchKernelEx", lambda *_: (result.CUDA_ERROR_INVALID_CONTEXT,))
    monkeypatch.setattr(driver, "cuGetErrorString", lambda _: (result.CUDA_SUCCESS, b"no context"))
    with pytest.raises(RuntimeError, match=r"launch of kernel: .*no context"):
        Function("kernel", driver.CUfunction(0)).bound(96, 512, Args(5), 64, dependent=dependent)(0)


def waits(program: Program, folder: Path, *, dependent: bool) -> list[bool]:
    """For each kernel of a program, made to be launched so: whether its machine code waits for the kernel before it."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # where its wheel has them
    tool = shutil.which("cuobjdump", path=f"{tools}{os.pathsep}{os.environ['PATH']}")
    if tool is None:
        pytest.skip("cuobjdump is not installed")
    cubin = folder / "kernel.cubin"
    made = Program(program.path, defines=program.defines | {"DEPENDENT": int(dependent)})
    cubin.write_bytes(made.cubin())
    text = subprocess.run([tool, "-sass", cubin], check=True, capture_output=True, text=True).stdout
    return ["ACQBULK" in kernel for kernel in text.split("Function :")[1:]]


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_kernel_waits(name: str, tmp_path: Path) -> None:
    early = waits(PROGRAMS[name], tmp_path, dependent=True)
    assert len(early) >= (1 if name == "few_rows" else 2) and all(early)
    assert not any(waits(PROGRAMS[name], tmp_path, dependent=False))
