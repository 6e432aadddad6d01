"""The segments of CUDA tensors, asked of a driver that is made up: allocations, physical handles, descriptors."""

from __future__ import annotations

import ctypes
import gc
import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver
from weft.symm_mem.heap.mapped_range import close_what_is_gone
from weft.symm_mem.registration import cuda_segments
from weft.symm_mem.registration.cuda_segments import CudaSegments
from weft.symm_mem.registration.segments import KnownSegment, Mapping, Segment, SegmentTable

_OK, _NOT_FOUND = driver.CUresult.CUDA_SUCCESS, driver.CUresult.CUDA_ERROR_INVALID_VALUE
_ASKS = driver.CUpointer_attribute
STEP = 2 << 20
FIRST = 1 << 40  # where memory lies


class Driver:
    """Memory of cudaMalloc, (base, size, number), and physical allocations by the chunks at which they are mapped.

    Attributes:
        held: how often this process holds each handle.
        opened, closed: IPC handles, by their addresses here.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allocations: list[tuple[int, int, int]] = []
        self.pools: list[int] = []
        self.chunks: dict[int, int] = {}
        self.held: dict[int, int] = {}
        self.exportable = True
        self.opened: dict[int, bytes] = {}
        self.closed: list[int] = []
        for name in dir(self):
            if name.startswith("cu"):
                monkeypatch.setattr(driver, name, getattr(self, name))
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, ...]:
        return _OK, mode

    def _allocation(self, address: int) -> tuple[int, int, int] | None:
        return next((a for a in self.allocations if a[0] <= address < a[0] + a[1]), None)

    def cuPointerGetAttribute(self, which: Any, address: int) -> tuple[Any, ...]:
        found = self._allocation(address)
        if which == _ASKS.CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
            return _OK, found is not None
        if which == _ASKS.CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
            return (_OK, 7) if address in self.pools else (_NOT_FOUND, None)
        assert which == _ASKS.CU_POINTER_ATTRIBUTE_BUFFER_ID and found is not None
        return _OK, found[2]

    def cuMemGetAddressRange(self, address: int) -> tuple[Any, ...]:
        found = self._allocation(address)
        assert found is not None
        return _OK, *found[:2]

    def cuIpcGetMemHandle(self, base: int) -> tuple[Any, ...]:
        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), f"{base:064x}".encode(), 64)
        return _OK, handle

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[Any, ...]:
        assert flags == int(driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS)
        base = FIRST + len(self.opened) * STEP
        self.opened[base] = ctypes.string_at(handle.getPtr(), 64)
        self.allocations.append((base, STEP, 900 + len(self.opened)))
        return _OK, base

    def cuIpcCloseMemHandle(self, base: int) -> tuple[Any, ...]:
        self.closed.append(base)
        return (_OK,)

    def cuMemRetainAllocationHandle(self, address: int) -> tuple[Any, ...]:
        handle = self.chunks.get(address // STEP * STEP)
        if handle is None:
            return _NOT_FOUND, None
        self.held[handle] = self.held.get(handle, 0) + 1
        return _OK, handle

    def cuMemRelease(self, handle: int) -> tuple[Any, ...]:
        self.held[handle] -= 1
        return (_OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[Any, ...]:
        if not self.exportable and handle % 2 == 0:
            return driver.CUresult.CUDA_ERROR_NOT_PERMITTED, None
        return _OK, os.open("/dev/null", os.O_RDONLY)


class Backend:
    """Notes what is mapped where. ``refused``: the descriptor that is none."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.refused = -1
        self.device = torch.device("cuda", 0)

    def quiesce(self) -> bool:
        return True

    def reserve(self, size: int) -> int:
        self.done.append(("reserve", size))
        return FIRST

    def adopt(self, fd: int, size: int) -> int:
        if fd == self.refused:
            raise RuntimeError("no handle")
        return fd + 100

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self.done.append((name, *args))


def made() -> tuple[CudaSegments, Backend]:
    backend = Backend()
    heap: Any = SimpleNamespace(rank=0, device=torch.device("cuda", 0), backend=backend)
    return CudaSegments(heap, SegmentTable()), backend


def at(address: int) -> Any:
    return SimpleNamespace(data_ptr=lambda: address)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def test_what_cudamalloc_gave_is_told_of_whole(gpu: Driver) -> None:
    own, _ = made()
    gpu.allocations = [(FIRST, 5000, 31), (FIRST + 8192, 300, 32)]
    found = own.outside_the_heap(at(FIRST + 1000), 256)
    assert found.fds == [] and found.segment[:4] == ("ipc", "31", FIRST, 5000)
    assert bytes.fromhex(found.segment.handle) == f"{FIRST:064x}".encode()
    # While it is in use all of it is there, and nobody is asked.
    own.table[0, found.segment.key] = KnownSegment(0, found.segment, Mapping(None), users=1)
    gpu.allocations = []
    assert own.outside_the_heap(at(FIRST + 4000), 1000).segment is found.segment
    with pytest.raises(RuntimeError, match="neither of cudaMalloc nor of the driver's"):
        own.outside_the_heap(at(FIRST + 4000), 1001)


def test_a_peers_allocation_is_opened_once_and_closed_by_a_later_call(gpu: Driver) -> None:
    own, _ = made()
    segment = Segment("ipc", "31", FIRST, 5000, b"handle".ljust(64, b".").hex())
    mapping = own.open(1, segment, [])
    assert mapping.address == FIRST and mapping.bytes == 5000
    assert gpu.opened == {FIRST: b"handle".ljust(64, b".")}
    close_what_is_gone()
    assert not gpu.closed
    del mapping
    gc.collect()
    assert not gpu.closed, "finalizers do not call the driver"
    close_what_is_gone()
    close_what_is_gone()
    assert gpu.closed == [FIRST]


@pytest.mark.parametrize(
    ("segment", "words"),
    [
        (Segment("ipc", "31", FIRST, 5000, "00" * 63), "rank 1 has posted an IPC handle of 63 bytes"),
        (
            Segment("ipc", "31", FIRST, STEP + 1, "00" * 64),
            rf"posted {STEP + 1} bytes of an allocation that has {STEP}",
        ),
        (Segment("vmm", "5", FIRST, STEP, parts=(STEP - 1,)), "rank 1 has posted physical allocations of"),
        (Segment("vmm", "5", FIRST, STEP, parts=(STEP, 0)), "rank 1 has posted physical allocations of"),
        (Segment("file", "5", FIRST, STEP), "rank 1 has posted a segment of kind 'file', which no GPU has"),
    ],
)
def test_what_a_peer_says_is_not_taken_on_trust(gpu: Driver, segment: Segment, words: str) -> None:
    own, backend = made()
    with pytest.raises(ValueError, match=words):
        own.open(1, segment, [3] * len(segment.parts))
    assert not backend.done
    gc.collect()
    close_what_is_gone()
    assert gpu.closed == list(gpu.opened), "what was opened stays open"


def test_physical_allocations_are_told_of_from_the_first_to_the_last(gpu: Driver) -> None:
    """Of 5 (one step), 6 (three), 7 (two) and 8: a tensor from the second step of 6 into 7."""
    own, _ = made()
    begin = FIRST
    for i, handle in enumerate([5, 6, 6, 6, 7, 7, 8]):
        gpu.chunks[begin + i * STEP] = handle
    found = own.outside_the_heap(at(begin + 2 * STEP + 100), 2 * STEP)
    assert found.segment == Segment("vmm", "6.7", begin + STEP, 5 * STEP, parts=(3 * STEP, 2 * STEP))
    assert len(found.fds) == 2
    assert gpu.held == {5: 0, 6: 1, 7: 1, 8: 1}, "of each it keeps one; who looks at 8 may keep that"
    cuda_segments.close_fds(found.fds)
    del found
    gc.collect()
    assert not any(gpu.held.values()), "handles are kept for good"


def test_memory_that_cannot_be_a_peers_is_refused(gpu: Driver) -> None:
    own, _ = made()
    gpu.pools = [FIRST]
    with pytest.raises(RuntimeError, match="memory of cudaMallocAsync cannot be a peer's"):
        own.outside_the_heap(at(FIRST), 8)
    gpu.pools, gpu.chunks = [], {FIRST + STEP: 3, FIRST + 3 * STEP: 5}
    with pytest.raises(RuntimeError, match=f"its memory has a hole {STEP} bytes after its start"):
        own.outside_the_heap(at(FIRST + STEP), 3 * STEP)
    gpu.chunks, gpu.exportable = {FIRST: 3, FIRST + STEP: 4}, False
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(RuntimeError, match=r"exported as a file descriptor \(CUDA_ERROR_NOT_PERMITTED\)"):
        own.outside_the_heap(at(FIRST), 2 * STEP)
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor is left"
    gc.collect()
    assert not any(gpu.held.values()), "handles are kept for good"


def test_a_peers_physical_allocations_are_mapped_side_by_side(gpu: Driver) -> None:
    own, backend = made()
    parts = (STEP, 3 * STEP)
    segment = Segment("vmm", "5.6", FIRST, 4 * STEP, parts=parts)
    mapping = own.open(1, segment, [10, 11])
    assert (mapping.address, mapping.bytes) == (FIRST, 4 * STEP)
    assert backend.done == [
        ("reserve", 4 * STEP),
        ("map", FIRST, 110, STEP),
        ("drop", 110),
        ("map", FIRST + STEP, 111, 3 * STEP),
        ("drop", 111),
    ]
    backend.done.clear()
    del mapping
    gc.collect()
    assert not backend.done
    close_what_is_gone()
    gone = [("unmap", FIRST, STEP), ("unmap", FIRST + STEP, 3 * STEP), ("release", FIRST, 4 * STEP)]
    assert backend.done == gone
    backend.done.clear()
    backend.refused = 11
    with pytest.raises(RuntimeError, match="no handle"):
        own.open(1, segment, [10, 11])
    assert backend.done[3:] == gone[::2], "half of a mapping is left"


def test_a_forked_child_closes_nothing(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    own, _ = made()
    mapping = own.open(1, Segment("ipc", "31", FIRST, 5000, "00" * 64), [])
    del mapping
    gc.collect()
    monkeypatch.setattr(cuda_segments.forks, "pid", -1)
    close_what_is_gone()
    assert not gpu.closed
