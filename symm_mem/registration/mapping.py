"""How a rank reaches a peer's segment: at an address of its own process, or by copies that the kernel makes."""

from __future__ import annotations

import torch

from ..backends.base import tensor_over
from .segments import Place, named_dtype


class Mapping:
    """A segment of a peer in this process. The memory stays mapped while this object or a tensor in it is there.

    Attributes:
        address: where it begins here; None where the kernel copies.
        bytes: of address space that it takes.
    """

    def __init__(self, address: int | None, keep: object = None, size: int = 0) -> None:
        self.address, self.bytes = address, size
        self._keep = keep

    def tensor(self, place: Place, device: torch.device) -> torch.Tensor:
        """The peer's tensor at this place."""
        assert self.address is not None
        dtype = named_dtype(place.dtype)
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=dtype, device=device)
        storage = tensor_over(self.address + place.offset, place.bytes, device, self)
        return tensor.set_(storage, 0, place.shape, place.strides)
