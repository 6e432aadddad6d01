"""What CUDA says of a call: its device, its stream, and whether that is being captured; and what it loads and encodes.

All of it is asked of ``state``, by its name in this module: another object in its place runs calls without a GPU.
"""

from __future__ import annotations

import ctypes
from functools import cache, lru_cache
from typing import Any

import torch


def _of_torch(name: str) -> Any:
    """torch's builds for CPUs have none, and nobody asks there."""
    return getattr(torch._C, name, None)


@lru_cache(maxsize=256)
def _stream(stream: int, device: int) -> torch.cuda.Stream:
    # The default stream's address is 0: for that ExternalStream takes another one, out of its pool.
    return torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)


@cache
def _driver() -> tuple[Any, Any]:
    """The driver's functions, and what raises where one fails: imported once there is a GPU, not at each call."""
    from cuda.bindings import driver

    from .vmm import check_driver

    return driver, check_driver


class _CurrentStream:
    """As torch.cuda.stream, in an eighth of its time."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._stream = stream

    def __enter__(self) -> None:
        stream = self._stream
        self._device = torch._C._cuda_getDevice()
        self._before = torch._C._cuda_getCurrentStream(stream.device_index)
        _make_current(stream.stream_id, stream.device_index, stream.device_type)

    def __exit__(self, *_: object) -> None:
        _make_current(*self._before)
        if self._device != self._before[1]:
            torch._C._cuda_setDevice(self._device)


def _make_current(stream: int, device: int, kind: int) -> None:
    torch._C._cuda_setStream(stream_id=stream, device_index=device, device_type=kind)


HOPPER_SMS, HOPPER = 132, (9, 0)  #: SMs and compute capability of a GPU that is not there


class CudaState:
    """As torch.cuda says it, without the objects that it makes: most of this is asked at every call.

    A device is its index, a stream its address.

    Attributes:
        orders: what stream_order.py keeps for each device.
    """

    def __init__(self) -> None:
        self.orders: dict[int, Any] = {}

    index_of = staticmethod(torch.Tensor.get_device)  #: the device of a tensor; -1: the CPU
    current_device = staticmethod(_of_torch("_cuda_getDevice"))
    current_stream = staticmethod(_of_torch("_cuda_getCurrentRawStream"))  #: of a device
    is_capturing = staticmethod(
        _of_torch("_cuda_isCurrentStreamCapturing")
    )  #: the current device's current stream
    stream = staticmethod(_stream)  #: as torch's object

    def stream_number(self, device: int) -> int:
        """torch's number of the device's current stream; of one that is not torch's own, its address."""
        return int(torch._C._cuda_getCurrentStream(device)[0])

    def stream_id(self, stream: int) -> int:
        """The driver's number of a stream, which it gives to no other one."""
        driver, check = _driver()
        return int(check(driver.cuStreamGetId(stream)))

    def capture_of(self, stream: int) -> tuple[str, int]:
        """ "NONE", "ACTIVE" or "INVALIDATED", and the graph into which a stream is being captured."""
        driver, check = _driver()
        status, graph = check(driver.cuStreamGetCaptureInfo(stream))[:2]
        return status.name.removeprefix("CU_STREAM_CAPTURE_STATUS_"), int(graph)

    def name(self, device: torch.device) -> str:
        return torch.cuda.get_device_name(device)

    def num_sms(self, device: torch.device) -> int:
        """Where there is no GPU, as plans may ask, those of an H200."""
        if not torch.cuda.is_available():
            return HOPPER_SMS
        return torch.cuda.get_device_properties(device).multi_processor_count

    def capability(self, device: torch.device) -> tuple[int, int]:
        """Where there is no GPU, as plans may ask, that of an H200."""
        assert device.type != "meta", f"{device} has no compute capability"
        return torch.cuda.get_device_capability(device) if torch.cuda.is_available() else HOPPER

    def memory(self, device: torch.device) -> dict[str, int]:
        """What a device with an index says of its memory, as ``memory_of`` has it."""
        from .vmm import memory_of

        driver, check = _driver()
        return memory_of(check(driver.cuDeviceGet(device.index)))

    def function(self, program: Any, name: str, shared: int) -> Any:
        """The kernel ``name`` of a program, loaded: see ``Program.function``."""
        return program.load(name, shared)

    def tensor_map(self, *tiled: Any) -> bytes:
        """The driver's tensor map, 128 bytes; the arguments are those of cuTensorMapEncodeTiled."""
        from .vmm import bind_context

        bind_context()
        driver, check = _driver()
        made = check(driver.cuTensorMapEncodeTiled(*tiled))
        return ctypes.string_at(made.getPtr(), 128)

    def own_stream(self, owner: object, device: torch.device) -> int:
        """A stream of the highest priority that lives as long as ``owner``."""
        from .vmm import own_stream

        return own_stream(owner, device, first=True)

    def side_stream(self, device: int) -> torch.cuda.Stream:
        """One of torch's own."""
        return torch.cuda.Stream(device)

    def copy(self, to: int, source: int, size: int, stream: int) -> None:
        """Let a copy engine copy ``size`` bytes, after what is on the stream."""
        driver, check = _driver()
        check(driver.cuMemcpyDtoDAsync(to, source, size, stream))

    def copy_rows(self, to: int, source: int, shape: tuple[int, int], step: int, stream: int) -> None:
        """The same of rows of so many bytes that lie ``step`` bytes apart, one after the other to ``to``."""
        driver, check = _driver()
        rows, size = shape
        copy = driver.CUDA_MEMCPY2D()
        copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_DEVICE
        copy.srcDevice, copy.srcPitch, copy.dstDevice, copy.dstPitch = source, step, to, size
        copy.WidthInBytes, copy.Height = size, rows
        check(driver.cuMemcpy2DAsync(copy, stream))

    def clear(self, at: int, size: int, stream: int) -> None:
        """Let ``size`` bytes be zeros, after what is on the stream."""
        driver, check = _driver()
        check(driver.cuMemsetD8Async(at, 0, size, stream))

    def hold_in_graph(self, stream: int, held: int, destructor: int) -> None:
        """``destructor(held)``, of C, is called once nothing is left of the graph that ``stream`` is captured into."""
        driver, check = _driver()
        graph = check(driver.cuStreamGetCaptureInfo(stream))[2]
        no_sync = driver.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC
        made = check(driver.cuUserObjectCreate(held, driver.CUhostFn(destructor), 1, no_sync))
        move = driver.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE
        check(driver.cuGraphRetainUserObject(graph, made, 1, move))

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def graph_event(self) -> Any:
        """A ``GraphEvent`` on the current device."""
        from .graph_event import GraphEvent

        return GraphEvent()

    def make_current(self, device: torch.device) -> Any:
        """Inside a ``with`` the device is the current one."""
        return torch.cuda.device(device)

    def make_stream_current(self, stream: torch.cuda.Stream) -> Any:
        """Inside a ``with`` the stream is the current one of its device, which is the current one."""
        return _CurrentStream(stream)


state = CudaState()


def current_stream_of(x: torch.Tensor) -> int:
    """The current stream on the device where x lies."""
    stream: int = state.current_stream(state.index_of(x))
    return stream
