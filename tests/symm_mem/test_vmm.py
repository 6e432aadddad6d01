"""Which ranks can share the memory of their GPUs, asked of a driver that is made up; GPUs that are not there."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuda.bindings import driver
from weft import symm_mem
from weft.symm_mem.backends import vmm

_OK = driver.CUresult.CUDA_SUCCESS


def ranks(*gpus: str, mps: bool = False) -> list[dict[str, Any]]:
    alike = {"host": "here", "boot": "1", "net": "1", "user": 1, "mps": mps}
    alike |= {"capability": "9.0", "sms": 132, "memory": 4916736, "l2": 60 << 20}
    return [{**alike, "gpu": gpu.encode().hex()} for gpu in gpus]


def backend(monkeypatch: pytest.MonkeyPatch, index: int, peers: bool, nvlink: bool = True) -> vmm.VmmBackend:
    """On GPU ``index`` of "a" and "b", which have peer access to each other or not, and never to themselves."""
    fake = SimpleNamespace(
        CUresult=driver.CUresult,
        CUdevice_attribute=driver.CUdevice_attribute,
        CUdevice_P2PAttribute=driver.CUdevice_P2PAttribute,
        cuDeviceGetAttribute=lambda *_: (_OK, 1),
        cuDeviceGetCount=lambda: (_OK, 2),
        cuDeviceGet=lambda i: (_OK, i),
        cuDeviceGetUuid=lambda i: (_OK, SimpleNamespace(bytes=b"ab"[i : i + 1])),
        cuDeviceCanAccessPeer=lambda mine, other: (_OK, int(peers and mine != other)),
        cuDeviceGetP2PAttribute=lambda asked, mine, other: (_OK, int(nvlink and mine != other)),
    )
    monkeypatch.setattr(vmm, "driver", fake)
    made = object.__new__(vmm.VmmBackend)
    made._handle, made.to_be_tried, made.over_pcie = index, False, False
    return made


def test_ranks_share_a_gpu_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WEFT_SHARE_GPUS", raising=False)
    assert vmm.refuse_shared(ranks("a", "b", "c")) is None
    for said in (None, "0"):
        if said is not None:
            monkeypatch.setenv("WEFT_SHARE_GPUS", said)
        reason = vmm.refuse_shared(ranks("a", "b", "c", "b"))
        assert reason is not None and reason.startswith("ranks 1 and 3 share one GPU;")
        assert "WEFT_SHARE_GPUS=1" in reason
    monkeypatch.setenv("WEFT_SHARE_GPUS", "1")
    assert vmm.refuse_shared(ranks("a", "b", "a", "b")) is None
    reason = vmm.refuse_shared(ranks("a", "a", mps=True))
    assert reason is not None and "under MPS" in reason
    assert vmm.refuse_shared(ranks("a", "b", mps=True)) is None


def test_a_setting_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SHARE_GPUS", "yes")
    with pytest.raises(ValueError, match="WEFT_SHARE_GPUS: is 'yes', must be 0 or 1"):
        vmm.refuse_shared(ranks("a", "b"))


def test_a_shared_gpu_needs_no_peer_access_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEFT_SHARE_GPUS", "1")
    for rank, gpu in enumerate((0, 1, 0, 1)):
        assert backend(monkeypatch, gpu, peers=True).refuse(ranks("a", "b", "a", "b"), rank) is None
    assert backend(monkeypatch, 0, peers=False).refuse(ranks("a", "a"), 1) is None
    reason = backend(monkeypatch, 0, peers=False).refuse(ranks("a", "a", "b"), 1)
    assert reason == "the GPUs of rank 1 and rank 2 have no peer-to-peer access"
    for others, tried in ((("a", "a"), False), (("a", "hidden"), True)):  # from this process
        made = backend(monkeypatch, 0, peers=False)
        assert made.refuse(ranks(*others), 0) is None
        assert made.to_be_tried is tried


@pytest.mark.parametrize("nvlink", [False, True])
def test_links_that_are_no_nvlink(monkeypatch: pytest.MonkeyPatch, nvlink: bool) -> None:
    for others, over_pcie in ((("a", "b"), not nvlink), (("a", "a"), False)):
        monkeypatch.setenv("WEFT_SHARE_GPUS", "1")
        made = backend(monkeypatch, 0, peers=True, nvlink=nvlink)
        assert made.refuse(ranks(*others), 0) is None
        assert made.over_pcie is over_pcie


class Nvml:
    """A library that knows two GPUs by their UUIDs. ``status``: of NVLink between them, 0 is that there is one."""

    def __init__(self, status: int, answers: int = 0) -> None:
        self.status, self.answers, self.open = status, answers, 0

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        known = [b"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f", b"GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"]
        if uuid not in known:
            return 6
        handle._obj.value = 7 + known.index(uuid)
        return 0

    def nvmlDeviceGetP2PStatus(self, gpu: Any, other: Any, index: int, status: Any) -> int:
        assert (gpu.value, other.value, index) == (7, 8, 2)
        status._obj.value = self.status
        return self.answers


MINE, HIDDEN = bytes(range(16)), bytes(range(0xF0, 0x100))


@pytest.mark.parametrize(
    ("library", "other", "over_pcie"),
    [
        (Nvml(0), HIDDEN, False),
        (Nvml(5), HIDDEN, True),
        (Nvml(0, answers=3), HIDDEN, True),
        (Nvml(0), MINE[::-1], True),
        (None, HIDDEN, True),
    ],
)
def test_hidden_gpus_are_asked_of_nvml(
    monkeypatch: pytest.MonkeyPatch, library: Nvml | None, other: bytes, over_pcie: bool
) -> None:
    def load(name: str) -> Nvml:
        assert name == "libnvidia-ml.so.1"
        if library is None:
            raise OSError(name)
        return library

    monkeypatch.setattr(ctypes, "CDLL", load)
    made = backend(monkeypatch, 0, peers=True)
    found = [{**of, "gpu": gpu.hex()} for of, gpu in zip(ranks("a", "b"), (MINE, other), strict=True)]
    assert made.refuse(found, 0) is None
    assert made.to_be_tried and made.over_pcie is over_pcie
    assert library is None or library.open == 0


@pytest.mark.parametrize(
    ("what", "other", "reason"),
    [
        ("capability", "8.0", "8.0 as compute capability, that of rank 0 has 9.0"),
        ("sms", 114, "114 SMs, that of rank 0 has 132"),
        ("memory", 3352320, "3352320 MB/s of memory, that of rank 0 has 4916736"),
        ("l2", 50 << 20, "52428800 bytes of L2 cache, that of rank 0 has 62914560"),
    ],
)
def test_gpus_that_are_not_alike_do_not_work_together(
    monkeypatch: pytest.MonkeyPatch, what: str, other: int, reason: str
) -> None:
    found = ranks("a", "b", "b")
    found[2][what] = other
    monkeypatch.setenv("WEFT_SHARE_GPUS", "1")
    assert backend(monkeypatch, 0, peers=True).refuse(found, 0) == f"the GPU of rank 2 has {reason}"


def test_what_memory_gives_is_its_clock_and_width(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = driver.CUdevice_attribute
    of_h100 = {
        flags.CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: 2619000,
        flags.CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: 5120,
        flags.CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE: 50 << 20,
    }
    monkeypatch.setattr(driver, "cuDeviceGetAttribute", lambda which, device: (_OK, of_h100[which]))
    assert vmm.memory_of(0) == {"memory": 3352320, "l2": 50 << 20}


# What CUDA refuses in other modes while any thread captures, and ends the capture for.
_RELAXED = (
    "cuCtxGetCurrent",
    "cuMemUnmap",
    "cuMemAddressFree",
    "cuMemRelease",
    "cuMemAddressReserve",
    "cuCtxSynchronize",
)


class Capturing:
    """A driver in whose process another thread captures a graph."""

    CUstreamCaptureMode = driver.CUstreamCaptureMode
    CUresult = driver.CUresult
    CUstream_flags = driver.CUstream_flags
    CUstreamCaptureStatus = driver.CUstreamCaptureStatus

    def __init__(self) -> None:
        self.mode: Any = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL
        self.called: list[str] = []
        self.synchronized = _OK
        self.captured: int | None = None  # a stream

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> tuple[Any, Any]:
        before, self.mode = self.mode, mode
        return _OK, before

    def cuStreamIsCapturing(self, stream: int) -> tuple[Any, Any]:
        assert self.mode == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        status = driver.CUstreamCaptureStatus
        captured = status.CU_STREAM_CAPTURE_STATUS_ACTIVE
        return _OK, captured if stream == self.captured else status.CU_STREAM_CAPTURE_STATUS_NONE

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any) -> tuple[Any, ...]:
            assert self.mode == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED, name
            self.called.append(name)
            if name == "cuCtxGetStreamPriorityRange":
                return _OK, 0, 0
            return (self.synchronized,) if name == "cuCtxSynchronize" else (_OK, 7)

        return call


@pytest.fixture
def capturing(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[vmm.VmmBackend, Capturing]]:
    fake = Capturing()
    monkeypatch.setattr(vmm, "driver", fake)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    streams = cycle((3, 4))
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: SimpleNamespace(cuda_stream=next(streams)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.cuCtxSynchronize())
    made = object.__new__(vmm.VmmBackend)
    made.device = torch.device("cuda", 0)
    vmm.torch_streams.cache_clear()
    yield made, fake
    vmm.torch_streams.cache_clear()


def test_nothing_of_a_heap_ends_another_threads_capture(capturing: tuple[vmm.VmmBackend, Capturing]) -> None:
    made, fake = capturing
    made.unmap(0, 1), made.release(0, 1), made.drop(7), made.reserve(1)
    assert made.quiesce()
    assert sorted(fake.called) == sorted(_RELAXED)
    owner = Capturing()
    vmm.own_stream(owner, made.device)
    del owner
    gc.collect()
    assert fake.called[-1] == "cuStreamDestroy"
    assert fake.mode == driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL


def test_a_device_that_another_thread_captures_on_is_not_quiet(
    capturing: tuple[vmm.VmmBackend, Capturing],
) -> None:
    made, fake = capturing
    fake.synchronized = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED
    assert not made.quiesce()


def test_nobody_waits_for_a_device_while_another_thread_captures(
    capturing: tuple[vmm.VmmBackend, Capturing],
) -> None:
    made, fake = capturing
    fake.captured = 4
    assert not made.quiesce()
    assert "cuCtxSynchronize" not in fake.called


def test_a_gpu_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match=r"device: is 'cuda:2', must be one of the 2 GPUs that this"):
            symm_mem.empty(2, device="cuda:2")
    finally:
        dist.destroy_process_group()
