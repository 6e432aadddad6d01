"""CPU ranks on one machine: memory files (memfd) mapped into every rank's process."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
from typing import Any

import torch

from .base import Backend

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value


class HostBackend(Backend):
    """The twin of ``VmmBackend`` without a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.granularity = mmap.ALLOCATIONGRANULARITY
        self.chunk = 8 << 20
        self.span = 64 << 30

    def identity(self) -> dict[str, Any]:
        return {**host_identity(), "machine": platform.machine()}

    def refuse(self, ranks: list[dict[str, Any]], rank: int) -> str | None:
        if (reason := refuse_hosts(ranks)) is not None:
            return reason
        if platform.machine() not in ("x86_64", "AMD64"):
            # Flags are plain stores: data before flag holds in x86-64's memory model and not in Arm's.
            return f"CPU ranks need x86-64, this is {platform.machine()}"
        return None

    def reserve(self, size: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return _mmap(None, size, 0, flags, -1, f"cannot reserve {size} bytes of addresses")

    def release(self, address: int, size: int) -> None:
        _libc.munmap(address, size)

    def create(self, size: int) -> tuple[int, int]:
        fd = shared_memory(size)
        return fd, fd

    def adopt(self, fd: int, size: int) -> int:
        if (found := os.fstat(fd).st_size) != size:
            raise OSError(f"a peer's chunk has {found} bytes, expected {size}")
        return fd

    def map(self, address: int, handle: int, size: int) -> None:
        prot = mmap.PROT_READ | mmap.PROT_WRITE
        _mmap(address, size, prot, mmap.MAP_SHARED | _MAP_FIXED, handle, f"cannot map {size} bytes")

    def unmap(self, address: int, size: int) -> None:
        # Back to an empty reservation: nothing else may settle inside the heap's range.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE | _MAP_FIXED
        _mmap(address, size, 0, flags, -1, f"cannot unmap {size} bytes")

    def zero(self, address: int, size: int) -> None:
        ctypes.memset(address, 0, size)


def shared_memory(size: int) -> int:
    """Memory in a file of no name, as a descriptor."""
    fd = os.memfd_create("weft", os.MFD_CLOEXEC)
    try:
        # Take the pages now: a full machine is then an error here and no SIGBUS at the first store.
        os.posix_fallocate(fd, 0, size)
    except BaseException as e:
        os.close(fd)
        if isinstance(e, OSError):
            raise OSError(e.errno, f"no shared memory for {size} bytes: {e.strerror}") from e
        raise  # Ctrl-C: this takes its time
    return fd


def map_file(fd: int, size: int) -> int:
    """Map the first ``size`` bytes of a shared file somewhere; it stays mapped whatever becomes of ``fd``."""
    prot = mmap.PROT_READ | mmap.PROT_WRITE
    return _mmap(None, size, prot, mmap.MAP_SHARED, fd, f"cannot map {size} bytes")


def unmap_file(address: int, size: int) -> None:
    _libc.munmap(address, size)


def _mmap(address: int | None, size: int, prot: int, flags: int, fd: int, problem: str) -> int:
    got = _libc.mmap(address, size, prot, flags, fd, 0)
    if got == _MAP_FAILED:
        errno = ctypes.get_errno()
        raise OSError(errno, f"{problem}: {os.strerror(errno)}")
    return got


def host_identity() -> dict[str, Any]:
    """Which host and user this process belongs to; abstract sockets reach as far as the network namespace."""
    with open("/proc/sys/kernel/random/boot_id") as f:
        boot = f.read().strip()
    return {
        "host": platform.node(),
        "boot": boot,
        "net": os.readlink("/proc/self/ns/net"),
        "user": os.getuid(),
    }


def refuse_hosts(ranks: list[dict[str, Any]]) -> str | None:
    for rank, identity in enumerate(ranks):
        if identity["boot"] != ranks[0]["boot"]:
            return (
                f"the group spans hosts: rank 0 runs on {ranks[0]['host']}, rank {rank} on {identity['host']}"
            )
        if identity["net"] != ranks[0]["net"]:
            return f"rank {rank} runs in another network namespace (container) than rank 0"
        if identity["user"] != ranks[0]["user"]:
            return f"rank {rank} runs as user {identity['user']}, rank 0 as user {ranks[0]['user']}"
    return None
