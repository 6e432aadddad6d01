"""What ranks tell each other of their tensors' memory, and how they reach it.

Nothing that is received is taken on trust.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..backends.base import tensor_over
from ..errors import WeftError

KINDS = ("heap", "file", "process", "ipc", "vmm", "empty")
#: Unused mappings of these are kept: they keep the file or the physical memory as well, whose owner keeps its handles,
#: so that no other can take its name meanwhile. Not of what cudaMalloc gave: its owner must not free what is mapped.
LASTING = ("file", "vmm")
_MOST_FDS = 4096


class Segment(NamedTuple):
    """A stretch of a rank's memory that its peers reach as a whole, as its owner tells of it (JSON).

    Attributes:
        kind: "heap" (of the group), "file" (shared memory), "process" (what the kernel copies), "ipc" (cudaMalloc),
            "vmm" (physical handles), "empty" (of a tensor without elements).
        name: its generation. While anybody uses the segment its owner gives this name to no other, also not to one
            that is later at the same address.
        base: the address in the owner's process.
        size: bytes.
        handle: what a peer opens it with, in hex.
        parts: bytes of each of its files, in order.
    """

    kind: str
    name: str
    base: int
    size: int
    handle: str = ""
    parts: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[str, str, int]:
        return self.kind, self.name, self.size


class Place(NamedTuple):
    """Where a tensor lies: which of the rank's segments, how many bytes after its start, strides in elements."""

    segment: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """From the tensor's first byte to its last one."""
        return extent(self.shape, self.strides) * named_dtype(self.dtype).itemsize

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


def extent(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last one in memory."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def name_of_dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def named_dtype(name: str) -> torch.dtype:
    """Raises: ValueError: torch has no such dtype."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return found


def read_segment(rank: int, post: Any) -> Segment:
    """What a rank has posted of a segment.

    Raises:
        WeftError: it is none.
    """
    try:
        kind, name, base, size, handle, parts = post
        found = Segment(
            str(kind), str(name), _natural(base), _natural(size), str(handle), tuple(map(_natural, parts))
        )
        bytes.fromhex(found.handle)
        if (
            kind not in KINDS
            or len(found.parts) > _MOST_FDS
            or (found.parts and sum(found.parts) < found.size)
        ):
            raise ValueError("no segment")
    except (TypeError, ValueError) as e:
        raise WeftError(f"rank {rank} has posted {post!r}, which is no segment") from e
    return found


def read_place(rank: int, post: Any, segments: list[Segment]) -> Place:
    """What a rank has posted of a tensor, which must lie inside of its segment.

    Raises:
        WeftError: it does not, or it is no tensor.
    """
    try:
        segment, offset, shape, strides, dtype = post
        sizes, steps = tuple(map(_natural, shape)), tuple(map(_natural, strides))
        found = Place(_natural(segment), _natural(offset), sizes, steps, str(dtype))
        size = segments[found.segment].size
        if found.bytes + found.offset > size:
            raise ValueError(
                f"ends {found.bytes + found.offset} bytes after the start of a segment of {size}"
            )
    except (TypeError, ValueError, IndexError) as e:
        raise WeftError(f"rank {rank} has posted {post!r}, which is no tensor of its segments: {e}") from e
    return found


def _natural(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no size")
    return value


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
