"""What CUDA says of a call: its device, its stream, and whether that is being captured.

All of it is asked of ``state``, by its name in this module: another object in its place runs calls without a GPU.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch


def _of_torch(name: str) -> Any:
    """torch's builds for CPUs have none, and nobody asks there."""
    return getattr(torch._C, name, None)


@lru_cache(maxsize=256)
def _stream(stream: int, device: int) -> torch.cuda.Stream:
    # The default stream's address is 0: for that ExternalStream takes another one, out of its pool.
    return torch.cuda.ExternalStream(stream, device=device) if stream else torch.cuda.default_stream(device)


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
        from cuda.bindings import driver

        from .vmm import check_driver

        return int(check_driver(driver.cuStreamGetId(stream)))

    def capture_of(self, stream: int) -> tuple[str, int]:
        """ "NONE", "ACTIVE" or "INVALIDATED", and the graph into which a stream is being captured."""
        from cuda.bindings import driver

        from .vmm import check_driver

        status, graph = check_driver(driver.cuStreamGetCaptureInfo(stream))[:2]
        return status.name.removeprefix("CU_STREAM_CAPTURE_STATUS_"), int(graph)

    def num_sms(self, device: torch.device) -> int:
        return torch.cuda.get_device_properties(device).multi_processor_count

    def event(self) -> torch.cuda.Event:
        return torch.cuda.Event()

    def make_current(self, device: torch.device) -> Any:
        """Inside a ``with`` the device is the current one."""
        return torch.cuda.device(device)


state = CudaState()


def current_stream_of(x: torch.Tensor) -> int:
    """The current stream on the device where x lies."""
    stream: int = state.current_stream(state.index_of(x))
    return stream
