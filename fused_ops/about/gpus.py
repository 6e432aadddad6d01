"""The GPUs of this process as the driver knows them, without a context on any; and what copies between them take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...kernels.device.capability import ALL, ARCHS, capabilities_text

COPIED = 64 << 20  # bytes
_COPIES = 4  # of which the first does not count


@dataclass(frozen=True)
class Gpu:
    """What the driver says of one.

    Attributes:
        shares: whether its memory can be shared as file descriptors, as the heap is.
        reaches: the GPUs that it has peer-to-peer access to, of those that this process sees.
        by_nvlink: those of them whose memory it changes atomically, as over PCIe it cannot.
    """

    index: int
    name: str
    capability: tuple[int, int]
    sms: int
    memory: int
    shares: bool
    reaches: tuple[int, ...]
    by_nvlink: tuple[int, ...]

    def __str__(self) -> str:
        major, minor = self.capability
        return (
            f"{self.index}: {self.name}, {major}.{minor}, {self.sms} SMs, {self.memory / (1 << 30):.0f} GiB"
        )


def visible_gpus() -> list[Gpu] | str:
    """All that this process sees; or why the driver cannot be asked."""
    try:
        _asked("cuInit", 0)
        there = [_asked("cuDeviceGet", i) for i in range(_asked("cuDeviceGetCount"))]
    except Exception as e:  # no package, no library, no driver, no device: the words differ
        return _first_line(e)
    return [_gpu(index, there) for index in range(len(there))]


def _asked(what: str, *args: Any) -> Any:
    """The driver's answer."""
    from cuda.bindings import driver

    from ...symm_mem.backends.vmm import check_driver

    return check_driver(getattr(driver, what)(*args))


def _gpu(index: int, there: list[Any]) -> Gpu:
    from cuda.bindings import driver

    mine = there[index]

    def says(which: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{which}")
        return int(_asked("cuDeviceGetAttribute", attribute, mine))

    others = (i for i in range(len(there)) if i != index)
    reached = [i for i in others if _asked("cuDeviceCanAccessPeer", mine, there[i])]
    atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
    return Gpu(
        index,
        _asked("cuDeviceGetName", 128, mine).split(b"\0")[0].decode(),
        (says("COMPUTE_CAPABILITY_MAJOR"), says("COMPUTE_CAPABILITY_MINOR")),
        says("MULTIPROCESSOR_COUNT"),
        _asked("cuDeviceTotalMem", mine),
        bool(says("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
        tuple(reached),
        tuple(i for i in reached if _asked("cuDeviceGetP2PAttribute", atomics, mine, there[i])),
    )


def driver_version() -> str | None:
    """The CUDA version that the driver supports."""
    try:
        version = int(_asked("cuDriverGetVersion"))
    except Exception:
        return None
    return f"{version // 1000}.{version % 1000 // 10}"


def why_not_on(gpus: list[Gpu]) -> str | None:
    """Why ranks on all of these cannot run weft's kernels; None if they can."""
    for gpu in gpus:
        found = f"GPU {gpu.index} has compute capability {capabilities_text((gpu.capability,))}"
        if gpu.capability not in ARCHS:
            return f"{found}, must have {capabilities_text(ALL)}"
        if gpu.capability != gpus[0].capability:
            return f"{found}, GPU {gpus[0].index} has {capabilities_text((gpus[0].capability,))}"
        if not gpu.shares:
            return f"GPU {gpu.index} cannot share memory as file descriptors"
        if missing := [other.index for other in gpus if other != gpu and other.index not in gpu.reaches]:
            return f"GPU {gpu.index} has no peer-to-peer access to GPU {missing[0]}"
        if gpu.sms != gpus[0].sms:
            return f"GPU {gpu.index} has {gpu.sms} SMs, GPU {gpus[0].index} has {gpus[0].sms}"
    return None


def copy_speed(source: int, target: int) -> float | str:
    """GB/s of copies from one GPU's memory to another's; or why there is no figure. It makes a context on both."""
    try:
        x = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{source}")
        y = torch.empty(COPIED, dtype=torch.uint8, device=f"cuda:{target}")
        with torch.cuda.device(source):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            y.copy_(x)
            begin.record()
            for _ in range(_COPIES - 1):
                y.copy_(x)
            end.record()
            end.synchronize()
            return (_COPIES - 1) * COPIED / begin.elapsed_time(end) / 1e6
    except RuntimeError as e:  # another process may have all of the memory
        return _first_line(e)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
