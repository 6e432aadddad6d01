"""CUDA ranks on one host: the driver's virtual memory management, shared as POSIX file descriptors.

Peers' chunks are mapped after each rank's own, so a kernel reaches every rank by address arithmetic. NVLink
multicast is not used anywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from uuid import UUID

import torch
from cuda.bindings import driver

from ..forks import finalize
from ..switches import is_on
from .base import Backend
from .host import host_identity, refuse_hosts

_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_FORBIDDEN_BY_CAPTURE = range(900, 910)  # CUresult: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED and those after it
_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK
_POOL = 32  # streams of each priority that torch hands out in turn
# What must be equal among a group's GPUs, and its name in messages.
_ALIKE = {
    "capability": "as compute capability",
    "sms": "SMs",
    "memory": "MB/s of memory",
    "l2": "bytes of L2 cache",
}


def check_driver(result: tuple[Any, ...]) -> Any:
    """The value of a driver call, or a RuntimeError with the driver's own words."""
    error, *values = result
    if error != driver.CUresult.CUDA_SUCCESS:
        _, text = driver.cuGetErrorString(error)
        raise RuntimeError(f"{error.name}: {text.decode() if text else 'unknown error'}")
    return values[0] if len(values) == 1 else values


def bind_context() -> int:
    """The current CUDA context, as an integer. A thread that has none gets that of torch's current device: torch leaves
    that to the runtime's first launch, which in a thread of autograd's or the user's may come after a driver call."""
    context = check_driver(driver.cuCtxGetCurrent())
    if not int(context):
        device = check_driver(driver.cuDeviceGet(torch.cuda.current_device()))
        context = check_driver(driver.cuDevicePrimaryCtxRetain(device))
        check_driver(driver.cuCtxSetCurrent(context))
    return int(context)


def own_stream(owner: object, device: torch.device, *, first: bool = False) -> int:
    """A stream (a CUstream as an integer) that lives as long as ``owner``, and is nobody else's.

    Streams of torch's pool are handed out more than once: one may be captured, or wait for concurrent work.

    Args:
        first: it has the highest priority.
    """
    flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
    with relaxed_capture(), torch.cuda.device(device):
        bind_context()
        lowest, highest = check_driver(driver.cuCtxGetStreamPriorityRange())
        handle = check_driver(driver.cuStreamCreateWithPriority(flags, highest if first else lowest))
    finalize(owner, _destroy_stream, handle)
    return int(handle)


@cache
def torch_streams(device: torch.device) -> tuple[int, ...]:
    """The streams that torch hands out on a device, of which ``torch.cuda.graph`` captures one. They live as long as
    the process."""
    with relaxed_capture():
        made = (torch.cuda.Stream(device, priority=p) for p in (0, -1) for _ in range(_POOL))
        return tuple({stream.cuda_stream for stream in made})


def _is_captured(streams: Iterable[int]) -> bool:
    """Whether any thread captures one of these."""
    none = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
    with relaxed_capture():
        return any(check_driver(driver.cuStreamIsCapturing(stream)) != none for stream in streams)


def _destroy_stream(handle: Any) -> None:
    with relaxed_capture():
        driver.cuStreamDestroy(handle)


class VmmBackend(Backend):
    """The twin of ``HostBackend`` on NVIDIA GPUs."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.init()
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        with torch.cuda.device(self.device):
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream().synchronize()  # makes the primary context, which the driver calls need
        self._handle = check_driver(driver.cuDeviceGet(index))
        self._prop = driver.CUmemAllocationProp()
        self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = index
        self._prop.requestedHandleTypes = _FD
        minimum = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity = check_driver(driver.cuMemGetAllocationGranularity(self._prop, minimum))
        self.chunk = 32 << 20
        total = torch.cuda.get_device_properties(self.device).total_memory
        self.span = -(-total // (1 << 30)) << 30
        self._side = own_stream(self, self.device)
        torch_streams(self.device)  # now: torch makes them when it is first asked for one

    def identity(self) -> dict[str, Any]:
        uuid = bytes(check_driver(driver.cuDeviceGetUuid(self._handle)).bytes).hex()
        # A driver that has never heard of the question has no answer.
        attribute = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        error, mps = driver.cuDeviceGetAttribute(attribute, self._handle)
        return {
            **host_identity(),
            "gpu": uuid,
            "capability": ".".join(map(str, torch.cuda.get_device_capability(self.device))),
            "sms": torch.cuda.get_device_properties(self.device).multi_processor_count,
            **memory_of(self._handle),
            "mps": error == driver.CUresult.CUDA_SUCCESS and bool(mps),
        }

    def refuse(self, ranks: list[dict[str, Any]], rank: int) -> str | None:
        if (reason := refuse_hosts(ranks)) is not None:
            return reason
        if (reason := refuse_shared(ranks) or refuse_unlike(ranks)) is not None:
            return reason
        flags = driver.CUdevice_attribute
        if not check_driver(
            driver.cuDeviceGetAttribute(
                flags.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, self._handle
            )
        ):
            return f"the GPU of rank {rank} cannot share memory as file descriptors"
        visible = {
            bytes(check_driver(driver.cuDeviceGetUuid(d)).bytes).hex(): d
            for d in (
                check_driver(driver.cuDeviceGet(i)) for i in range(check_driver(driver.cuDeviceGetCount()))
            )
        }
        for peer, identity in enumerate(ranks):
            if identity["gpu"] == ranks[rank]["gpu"]:  # one that is shared is no peer of itself
                continue
            other = visible.get(identity["gpu"])
            if other is None:  # hidden from this process: what it maps then is seen by doing it
                self.to_be_tried = True
                self.over_pcie |= not are_joined_by_nvlink(ranks[rank]["gpu"], identity["gpu"])
            elif not check_driver(driver.cuDeviceCanAccessPeer(self._handle, other)):
                return f"the GPUs of rank {rank} and rank {peer} have no peer-to-peer access"
            else:
                atomic = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED
                self.over_pcie |= not check_driver(
                    driver.cuDeviceGetP2PAttribute(atomic, self._handle, other)
                )
        return None

    def reserve(self, size: int) -> int:
        with relaxed_capture():
            return int(check_driver(driver.cuMemAddressReserve(size, 0, 0, 0)))

    def release(self, address: int, size: int) -> None:
        with relaxed_capture():
            check_driver(driver.cuMemAddressFree(address, size))

    def create(self, size: int) -> tuple[int, Any]:
        with relaxed_capture():
            handle = check_driver(driver.cuMemCreate(size, self._prop, 0))
            try:
                fd = check_driver(driver.cuMemExportToShareableHandle(handle, _FD, 0))
            except BaseException:
                self.drop(handle)
                raise
        return int(fd), handle

    def adopt(self, fd: int, size: int) -> Any:
        with relaxed_capture():
            return check_driver(driver.cuMemImportFromShareableHandle(fd, _FD))

    def map(self, address: int, handle: Any, size: int) -> None:
        access = driver.CUmemAccessDesc()
        access.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        access.location.id = self.device.index
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        with relaxed_capture():
            check_driver(driver.cuMemMap(address, size, 0, handle, 0))
            try:
                check_driver(driver.cuMemSetAccess(address, size, [access], 1))
            except BaseException:
                self.unmap(address, size)
                raise

    def unmap(self, address: int, size: int) -> None:
        with relaxed_capture():
            check_driver(driver.cuMemUnmap(address, size))

    def drop(self, handle: Any) -> None:
        with relaxed_capture():
            check_driver(driver.cuMemRelease(handle))

    def zero(self, address: int, size: int) -> None:
        with relaxed_capture(), torch.cuda.device(self.device):
            bind_context()
            check_driver(driver.cuMemsetD8Async(address, 0, size, self._side))
            check_driver(driver.cuStreamSynchronize(self._side))

    def quiesce(self) -> bool:
        # The wait below would end a capture, also another thread's (tried on H100). So it is not made while one of
        # torch's streams is captured; captures of other libraries' streams cannot be seen.
        if torch.cuda.is_current_stream_capturing() or _is_captured(torch_streams(self.device)):
            return False
        with relaxed_capture(), torch.cuda.device(self.device):
            bind_context()
            (error,) = driver.cuCtxSynchronize()
        if int(error) in _FORBIDDEN_BY_CAPTURE:  # by another thread's
            return False
        check_driver((error,))
        return True

    def new_record(self) -> torch.Tensor:
        with relaxed_capture(), torch.inference_mode(False):  # a reset zeroes it in whatever mode
            return torch.zeros(8, dtype=torch.int64, device="cpu", pin_memory=True)


def refuse_shared(ranks: list[dict[str, Any]]) -> str | None:
    """Why ranks that share a GPU cannot work together; None if no two do, or if WEFT_SHARE_GPUS=1 lets them.

    Processes share a GPU by time slices of some milliseconds: what a kernel waits for comes in another process's slice.
    That is correct and slow. Under MPS kernels of several processes run at once and keep each other off the SMs, also
    with CUDA_MPS_ACTIVE_THREAD_PERCENTAGE, which says how many a process may have, not which (tried:
    bench/results/h200-x1-mps.txt).

    Raises:
        ValueError: WEFT_SHARE_GPUS is neither 0 nor 1.
    """
    allowed = is_on("WEFT_SHARE_GPUS")
    seen: dict[str, int] = {}
    for rank, identity in enumerate(ranks):
        if (first := seen.setdefault(identity["gpu"], rank)) != rank:
            both = f"ranks {first} and {rank} share one GPU"
            if identity["mps"]:
                return f"{both} under MPS, where kernels that wait for each other keep each other off it"
            if not allowed:
                return f"{both}; that is slow, and for trying out: WEFT_SHARE_GPUS=1 allows it"
    return None


def refuse_unlike(ranks: list[dict[str, Any]]) -> str | None:
    """Why GPUs that differ cannot work together: kernels' configurations depend on it. None if they do not."""
    for what, named in _ALIKE.items():
        first = ranks[0][what]
        for rank, identity in enumerate(ranks):
            if (found := identity[what]) != first:
                return f"the GPU of rank {rank} has {found} {named}, that of rank 0 has {first}"
    return None


def are_joined_by_nvlink(gpu: str, other: str) -> bool:
    """Whether NVLink joins two GPUs of this host, named by the hexadecimal digits of their UUIDs, one of which
    CUDA_VISIBLE_DEVICES may hide from CUDA; False where NVML does not know it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2() != 0:
        return False
    try:
        handles = ctypes.c_void_p(), ctypes.c_void_p()
        for uuid, handle in zip((gpu, other), handles, strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(uuid)}".encode(), ctypes.byref(handle)) != 0:
                return False
        status = ctypes.c_int()
        said = nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK, ctypes.byref(status))
        return said == 0 and status.value == 0
    finally:
        nvml.nvmlShutdown()


def memory_of(device: Any) -> dict[str, int]:
    """What a CUdevice says: "memory" is bytes a microsecond, by its clock and width, "l2" bytes."""

    def says(which: str) -> int:
        attribute = getattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{which}")
        return int(check_driver(driver.cuDeviceGetAttribute(attribute, device)))

    transfers = 2 * says("MEMORY_CLOCK_RATE")  # a millisecond, at both edges
    return {"memory": transfers * says("GLOBAL_MEMORY_BUS_WIDTH") // 8 // 1000, "l2": says("L2_CACHE_SIZE")}


@contextmanager
def relaxed_capture() -> Iterator[None]:
    """Lets this thread map memory or load code while a CUDA graph is being captured: none of it goes into the graph."""
    mode = check_driver(
        driver.cuThreadExchangeStreamCaptureMode(driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED)
    )
    try:
        yield
    finally:
        check_driver(driver.cuThreadExchangeStreamCaptureMode(mode))
