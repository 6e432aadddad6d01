"""What ranks tell each other of their tensors' memory, and how they reach it.

Nothing that is received is taken on trust.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch

from ..backends.base import tensor_over
from ..errors import WeftError

KINDS = ("heap", "file", "process", "ipc", "vmm")
#: Unused mappings of these are kept: they keep the file or the physical memory as well, whose owner keeps its handles,
#: so that no other can take its name meanwhile. Not of what cudaMalloc gave: its owner must not free what is mapped.
LASTING = ("file", "vmm")
_MOST_FDS = 4096
UNUSED = 32  #: so many segments that nobody uses are kept, to be found mapped the next time
UNUSED_BYTES = 256 << 20  #: and so many bytes of them: they keep memory that may be nobody's otherwise

SegmentKey: TypeAlias = tuple[int, tuple[str, str, int]]  # the owner's rank, and what names it there


class Segment(NamedTuple):
    """A stretch of a rank's memory that its peers reach as a whole, as its owner tells of it (JSON).

    Attributes:
        kind: "heap" (of the group, also for a tensor without elements), "file" (shared memory), "process" (what the
            kernel copies), "ipc" (cudaMalloc), "vmm" (physical handles).
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

    def holds(self, address: int, size: int) -> bool:
        return self.base <= address and address + size <= self.base + self.size


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


@dataclass
class KnownSegment:
    """A segment of ``rank``, how this rank reaches it, and how many registrations use it."""

    rank: int
    segment: Segment
    mapping: Mapping
    users: int = 0


class SegmentTable(dict[SegmentKey, KnownSegment]):
    """The segments that a group's registrations use, the same table on every rank, in the order of their last use.

    Each rank decides from it, and from what all have posted, which segments are new. So it changes only after a step
    that all ranks have completed, in one order: segments are taken, given back, and dropped by the same calls
    everywhere.
    """

    @property
    def bytes(self) -> int:
        """Of address space that mappings of peers' segments take."""
        return sum(known.mapping.bytes for known in self.values())

    def holding(self, rank: int, kind: str, address: int, size: int) -> Segment | None:
        """The segment of ``rank`` in use that holds these bytes."""
        for known in self.values():
            of = known.rank, known.segment.kind
            if of == (rank, kind) and known.users and known.segment.holds(address, size):
                return known.segment
        return None

    def use(self, key: SegmentKey, segment: Segment, make: Callable[[], KnownSegment]) -> None:
        """``segment``: as its owner tells of it now; an unused one may have come to lie elsewhere."""
        known = self.pop(key, None) or make()
        known.segment = segment
        known.users += 1
        self[key] = known

    def give_back(self, keys: Iterable[SegmentKey]) -> None:
        for key in keys:
            known = self[key]
            known.users -= 1
            if not known.users:
                del self[key]
                if known.segment.kind in LASTING:
                    self[key] = known
        unused = [key for key, known in self.items() if not known.users]
        left = sum(self[key].segment.size for key in unused)
        for i, key in enumerate(unused):
            if len(unused) - i <= UNUSED and left <= UNUSED_BYTES:
                break
            left -= self[key].segment.size
            del self[key]

    def keep_only(self, used: dict[SegmentKey, int]) -> None:
        """After a reset: those that so many registrations of all ranks use."""
        for key in self.keys() - used:
            del self[key]
        for key, users in used.items():
            self[key].users = users
