"""The segments of CPU tensors: on the group's heap, in shared memory, or the process's own, which the kernel copies."""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress

import torch

from ..backends.host import map_file, unmap_file
from ..forks import finalize
from .local import Described, OwnSegments
from .segments import Mapping, Segment


class HostSegments(OwnSegments):
    """Of CPU ranks."""

    def outside_the_heap(self, tensor: torch.Tensor, size: int) -> Described:
        address, storage = tensor.data_ptr(), tensor.untyped_storage()
        if storage.is_shared() and (found := _shared_file(address, size)) is not None:
            return found
        known = self.table.holding(self.rank, "process", address, size)
        if known is None:
            known = Segment("process", str(next(self.names)), storage.data_ptr(), storage.nbytes())
        return Described(known, [])

    def open_outside_the_heap(self, rank: int, segment: Segment, fds: list[int]) -> Mapping:
        if segment.kind == "process":
            return Mapping(None)
        if segment.kind != "file":
            raise ValueError(
                f"rank {rank} has posted a segment of kind {segment.kind!r}, which no CPU rank has"
            )
        (fd,) = fds
        # What lies after the end of a file cannot be mapped without a fault at the first look.
        if (there := os.fstat(fd).st_size) < segment.size:
            raise ValueError(f"rank {rank} has posted {segment.size} bytes of shared memory that has {there}")
        address = map_file(fd, segment.size)
        mapping = Mapping(address, None, segment.size)
        finalize(mapping, unmap_file, address, segment.size)
        return mapping


def _shared_file(address: int, size: int) -> Described | None:
    """The file that is mapped at an address, if this process can hand it on."""
    with open("/proc/self/maps") as f:
        for line in f:
            begin, _, end = line.split(" ", 1)[0].partition("-")
            first, last = int(begin, 16), int(end, 16)
            if first <= address < last:
                break
        else:
            return None
    fields = line.split(maxsplit=5)
    major, minor = (int(part, 16) for part in fields[3].split(":"))
    offset, file = int(fields[2], 16), (os.makedev(major, minor), int(fields[4]))
    if "s" not in fields[1] or not file[1] or address + size > last:
        return None
    path = fields[5].strip() if len(fields) > 5 else ""
    if (fd := _descriptor(file, path)) is None:
        return None
    status = os.fstat(fd)
    whole = min(status.st_size, offset + last - first)
    name = f"{status.st_dev}:{status.st_ino}"
    return Described(Segment("file", name, first - offset, whole, parts=(whole,)), [fd])


def _descriptor(file: tuple[int, int], path: str) -> int | None:
    """One of the file (device, inode) to read and write, which is the caller's: by its path, or as torch has one."""
    with suppress(OSError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if _is(fd, file):
            return fd
        os.close(fd)
    for entry in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not _is(int(entry), file):
                continue
            flags = fcntl.fcntl(int(entry), fcntl.F_GETFL)
            if flags & os.O_ACCMODE == os.O_RDWR and os.readlink(f"/proc/self/fd/{entry}").startswith("/"):
                return os.dup(int(entry))
    return None


def _is(fd: int, file: tuple[int, int]) -> bool:
    status = os.fstat(fd)
    return (status.st_dev, status.st_ino) == file
