"""What a device needs to hold a heap. One file next to this one for each device."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Backend(Protocol):
    """Address ranges, physical chunks that travel as file descriptors, and tensors over addresses."""

    device: torch.device
    granularity: int  #: bytes; sizes and offsets of chunks are multiples of it
    chunk: int  #: bytes; the heap grows by at least this much
    span: int  #: bytes of address range for each rank: what a heap can grow to
    to_be_tried: bool = False  #: ``refuse`` cannot tell if a peer's memory can be mapped: mapping it shows
    over_pcie: bool = False  #: a peer's memory is reached over PCIe, as ``refuse`` has found

    def identity(self) -> dict[str, Any]:
        """What the other ranks need to know of this one to judge whether memory can be shared (JSON)."""
        ...

    def refuse(self, ranks: list[dict[str, Any]], rank: int) -> str | None:
        """Why these ranks cannot address each other's memory, given their identities; None if they can."""
        ...

    def reserve(self, size: int) -> int:
        """An address range of ``size`` bytes with no memory mapped there."""
        ...

    def release(self, address: int, size: int) -> None: ...

    def create(self, size: int) -> tuple[int, Any]:
        """A physical chunk: its file descriptor and a handle for ``map``."""
        ...

    def adopt(self, fd: int, size: int) -> Any:
        """The handle of a peer's chunk from its descriptor."""
        ...

    def map(self, address: int, handle: Any, size: int) -> None: ...

    def unmap(self, address: int, size: int) -> None: ...

    def drop(self, handle: Any) -> None:
        """Give up a handle; the memory lives on while it is mapped somewhere. A descriptor is its holder's to close."""
        return

    def zero(self, address: int, size: int) -> None:
        """Fill with zeros and return when that is done, also while a CUDA graph is being captured."""
        ...

    def quiesce(self) -> bool:
        """Wait until this rank's queued work is done; False where that is not possible now (capture)."""
        return True

    def new_record(self) -> torch.Tensor | None:
        """Host memory of 8 int64 that a kernel can write to when a wait expires; None where none is needed."""
        return None


def tensor_over(address: int, size: int, device: torch.device, owner: object) -> Any:
    """An UntypedStorage over memory that is already there. It keeps ``owner`` alive."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, size)
    storage._weft_owner = owner
    return storage
