"""The kernel copies between a peer's memory and this process's: process_vm_readv and process_vm_writev.

It does so for processes of the same user, unless the machine forbids it (ptrace_scope, seccomp, a process that cannot
be dumped). ``probe`` finds that out with known bytes, before any tensor is relied on. An address is the peer's own: the
worst that a wrong one does is an error, or harm to the peer that has told it.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import secrets
from collections.abc import Iterator
from typing import Any

import torch

from ..bootstrap.processes import has_ended
from .segments import Place, named_dtype

_MOST = 1024  # IOV_MAX: runs of bytes in one call
_LARGEST = 1 << 30  # bytes in one call: the kernel ends at 2 GiB


class _Run(ctypes.Structure):
    """The kernel's struct iovec."""

    _fields_ = (("address", ctypes.c_uint64), ("length", ctypes.c_uint64))


_libc = ctypes.CDLL(None, use_errno=True)
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = [
        *(ctypes.c_int, ctypes.c_void_p, ctypes.c_ulong),
        *(ctypes.c_void_p, ctypes.c_ulong, ctypes.c_ulong),
    ]


class Probe:
    """Bytes by which peers see that they reach this process's memory, and that it is this process's."""

    def __init__(self) -> None:
        self._said = secrets.token_bytes(16)
        self._memory = ctypes.create_string_buffer(self._said, len(self._said))

    @property
    def post(self) -> list[Any]:
        """For the peers (JSON)."""
        return [ctypes.addressof(self._memory), self._said.hex()]


def probe(rank: int, process: dict[str, Any] | None, post: list[Any]) -> None:
    """Read a peer's ``Probe`` and write it back.

    Raises:
        OSError: the memory of rank's process cannot be copied, and why.
    """
    address, said = int(post[0]), bytes.fromhex(post[1])
    found = ctypes.create_string_buffer(len(said))
    runs = [(address, len(said))]
    try:
        _copy(process, ctypes.addressof(found), runs, write=False)
        if found.raw != said:
            raise OSError("other bytes than it wrote are there: another process has its number here")
        _copy(process, ctypes.addressof(found), runs, write=True)
    except OSError as e:
        reason = e.strerror or str(e)
        raise OSError(f"the memory of rank {rank}'s process cannot be copied here: {reason}{_hint()}") from e


def _hint() -> str:
    try:
        with open("/proc/sys/kernel/yama/ptrace_scope") as f:
            scope = f.read().strip()
    except OSError:
        return ""
    return "" if scope == "0" else f" (kernel.yama.ptrace_scope is {scope}; 0 allows it)"


class ProcessTensor:
    """A tensor in the memory of a peer's process."""

    def __init__(self, process: dict[str, Any] | None, address: int, place: Place) -> None:
        self._process, self._address, self.place = process, address, place

    def write(self, source: torch.Tensor) -> None:
        """Copy ``source``, of the same shape and dtype, into it.

        Raises:
            OSError: the process has ended, or has no such memory any more.
        """
        whole = source.detach().resolve_conj().resolve_neg().contiguous()
        self._transfer(whole, write=True)

    def read(self, out: torch.Tensor) -> None:
        """Copy it into ``out``, of the same shape and dtype.

        Raises:
            OSError: as ``write``.
        """
        plain = out.is_contiguous() and not out.is_conj() and not out.is_neg()
        whole = out if plain else torch.empty(out.shape, dtype=out.dtype)
        self._transfer(whole, write=False)
        if whole is not out:
            out.copy_(whole)

    def _transfer(self, whole: torch.Tensor, *, write: bool) -> None:
        if not whole.numel():
            return
        local, runs = whole.data_ptr(), self._runs()
        while batch := list(itertools.islice(runs, _MOST)):
            _copy(self._process, local, batch, write=write)
            local += sum(length for _, length in batch)

    def _runs(self) -> Iterator[tuple[int, int]]:
        """(address, bytes) of what lies together, in the order of the elements."""
        size = named_dtype(self.place.dtype).itemsize
        dims = list(zip(self.place.shape, self.place.strides, strict=True))
        run = size
        while dims and (dims[-1][0] == 1 or dims[-1][1] * size == run):
            run *= dims.pop()[0]
        steps = (range(0, count * stride * size, stride * size) for count, stride in dims)
        for offsets in itertools.product(*steps):
            begin = self._address + sum(offsets)
            for at in range(0, run, _LARGEST):
                yield begin + at, min(_LARGEST, run - at)


def _copy(process: dict[str, Any] | None, local: int, runs: list[tuple[int, int]], *, write: bool) -> None:
    # Its number may be another process's by now.
    if process is None or has_ended(process):
        raise ProcessLookupError(None, "its process has ended, or cannot be seen from here")
    call = _libc.process_vm_writev if write else _libc.process_vm_readv
    at = 0
    while at < len(runs):
        last, together = at, 0
        while last < len(runs) and together + runs[last][1] <= _LARGEST:
            together += runs[last][1]
            last += 1
        remote = (_Run * (last - at))(*(_Run(*run) for run in runs[at:last]))
        here = _Run(local, together)
        done = call(process["pid"], ctypes.byref(here), 1, remote, last - at, 0)
        if done != together:
            number = ctypes.get_errno() if done < 0 else 0
            raise OSError(
                number, os.strerror(number) if number else f"{done} of {together} bytes were copied"
            )
        local += together
        at = last
