"""The segments of CUDA tensors: what cudaMalloc gave, by CUDA IPC; expandable segments and pools, by physical handles.

An IPC handle is for a whole allocation, and a peer opens it once. What was mapped by the driver's virtual memory
management, as torch maps its expandable segments, consists of physical allocations, each mapped whole: those in which
a tensor lies travel as file descriptors, as the heap's do, and a peer maps them side by side in a range just as large.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from cuda.bindings import driver

from .. import forks
from ..backends.vmm import check_driver, relaxed_capture
from ..bootstrap.fd_exchange import close_fds
from ..heap.mapped_range import MappedRange, close_later
from .local import Described, OwnSegments
from .segments import Mapping, Segment

_FD = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
_ASKS = driver.CUpointer_attribute
_STEP = 2 << 20  # bytes: physical allocations begin and end at multiples of it
_IPC_BYTES = 64


class CudaSegments(OwnSegments):
    """Of ranks on GPUs."""

    outlives_peers = True

    def outside_the_heap(self, tensor: torch.Tensor, size: int) -> Described:
        address = tensor.data_ptr()
        for kind in ("ipc", "vmm"):  # in use, so all of it is still there
            if (known := self.table.holding(self.rank, kind, address, size)) is not None:
                return Described(known, [])
        with relaxed_capture(), torch.cuda.device(self.heap.device):
            if _asked(_ASKS.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, address):
                return _by_ipc(address)
            if int(_asked(_ASKS.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE, address) or 0):
                raise RuntimeError(
                    "memory of cudaMallocAsync cannot be a peer's; use torch's native allocator"
                )
            return _by_handles(address, size)

    def open_outside_the_heap(self, rank: int, segment: Segment, fds: list[int]) -> Mapping:
        with relaxed_capture(), torch.cuda.device(self.heap.device):
            if segment.kind == "ipc":
                return self._open_ipc(rank, segment)
            if segment.kind == "vmm":
                return self._map_handles(rank, segment, fds)
        raise ValueError(f"rank {rank} has posted a segment of kind {segment.kind!r}, which no GPU has")

    def _open_ipc(self, rank: int, segment: Segment) -> Mapping:
        said = bytes.fromhex(segment.handle)
        if len(said) != _IPC_BYTES:
            raise ValueError(f"rank {rank} has posted an IPC handle of {len(said)} bytes")
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), said, _IPC_BYTES)
        lazy = int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        base = int(check_driver(driver.cuIpcOpenMemHandle(handle, lazy)))
        device = self.heap.device

        def close() -> None:
            with relaxed_capture(), torch.cuda.device(device):
                driver.cuIpcCloseMemHandle(base)

        mapping = self._mapping(base, segment.size, close)
        there = int(check_driver(driver.cuMemGetAddressRange(base))[1])
        if there < segment.size:
            raise ValueError(f"rank {rank} has posted {segment.size} bytes of an allocation that has {there}")
        return mapping

    def _map_handles(self, rank: int, segment: Segment, fds: list[int]) -> Mapping:
        if any(part % _STEP or not part for part in segment.parts):
            raise ValueError(f"rank {rank} has posted physical allocations of {segment.parts} bytes")
        total = sum(segment.parts)
        where = MappedRange(self.heap.backend, total)
        try:
            at = where.base
            for fd, part in zip(fds, segment.parts, strict=True):
                where.adopt(at, fd, part)
                at += part
        except BaseException:
            where.close()
            raise
        return self._mapping(where.base, total, where.close)

    def _mapping(self, base: int, size: int, close: Callable[[], Any]) -> Mapping:
        mapping = Mapping(base, self.heap, size)
        forks.finalize(mapping, close_later, self.heap.backend, close)
        return mapping


class _Handles:
    """Physical allocations that this rank keeps: while it does, no other has their handles."""

    def __init__(self) -> None:
        self.kept: list[Any] = []
        forks.finalize(self, _release, self.kept)


def _release(handles: list[Any]) -> None:
    with relaxed_capture():
        for handle in handles:
            driver.cuMemRelease(handle)


def _asked(attribute: Any, address: int) -> Any:
    """What the driver says of a pointer; None where it does not know the question."""
    error, value = driver.cuPointerGetAttribute(attribute, address)
    return value if error == driver.CUresult.CUDA_SUCCESS else None


def _by_ipc(address: int) -> Described:
    base, size = (int(value) for value in check_driver(driver.cuMemGetAddressRange(address)))
    handle = check_driver(driver.cuIpcGetMemHandle(base))
    said = ctypes.string_at(handle.getPtr(), _IPC_BYTES)
    # Unique for as long as the process lives.
    number = check_driver(driver.cuPointerGetAttribute(_ASKS.CU_POINTER_ATTRIBUTE_BUFFER_ID, base))
    return Described(Segment("ipc", str(int(number)), base, size, said.hex()), [])


def _by_handles(address: int, size: int) -> Described:
    """The physical allocations that hold these bytes."""
    keep = _Handles()
    begin = address // _STEP * _STEP
    first = _retained(begin, keep)
    if first is None:
        raise RuntimeError(
            "its memory is neither of cudaMalloc nor of the driver's virtual memory management"
        )
    while _retained(begin - _STEP, keep, only=first) is not None:
        begin -= _STEP
    chunks = [(first, 0)]
    at, end = begin, address + size
    while True:
        handle = _retained(at, keep)
        if handle is not None and handle == chunks[-1][0]:
            chunks[-1] = handle, chunks[-1][1] + _STEP
        elif at >= end:
            break
        elif handle is None:
            raise RuntimeError(f"its memory has a hole {at - address} bytes after its start")
        else:
            chunks.append((handle, _STEP))
        at += _STEP
    return Described(
        Segment(
            *("vmm", ".".join(format(handle, "x") for handle, _ in chunks), begin, sum(n for _, n in chunks)),
            parts=tuple(n for _, n in chunks),
        ),
        _exported([handle for handle, _ in chunks]),
        keep,
    )


def _retained(address: int, keep: _Handles, only: int | None = None) -> int | None:
    """The physical allocation that is mapped at an address; None if there is none, or not this ``only`` one.

    Each is kept once.
    """
    error, handle = driver.cuMemRetainAllocationHandle(address)
    if error != driver.CUresult.CUDA_SUCCESS:
        return None
    number = int(handle)
    if any(int(kept) == number for kept in keep.kept[-1:]) or (only is not None and number != only):
        driver.cuMemRelease(handle)
    else:
        keep.kept.append(handle)
    return number if only in (None, number) else None


def _exported(handles: list[int]) -> list[int]:
    fds: list[int] = []
    for handle in handles:
        error, fd = driver.cuMemExportToShareableHandle(handle, _FD, 0)
        if error != driver.CUresult.CUDA_SUCCESS:
            close_fds(fds)
            raise RuntimeError(
                f"its physical memory cannot be exported as a file descriptor ({error.name}): the allocator made it "
                "so (of expandable segments: TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1)"
            )
        fds.append(int(fd))
    return fds
