"""Launches kernel.cu: signal, wait, put and get between registered tensors on CUDA, in the current stream's order.

Little data is moved by one kernel, which waits, copies and tells; much by a copy engine, between a kernel that waits
and one that tells; what is not contiguous on both sides by torch's copy kernel between the same two.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ...symm_mem.backends import cuda_state
from ...symm_mem.call_site import call_site
from ...symm_mem.heap.captured import CapturedGraph
from ...symm_mem.registration.engine import Access
from ...symm_mem.registration.registry import Registration, Registry
from ...symm_mem.registration.semaphores import ALLOWED, DONE, MOVED, SENT, TICKET, WAITED
from ...symm_mem.switches import is_on
from ...symm_mem.timeouts import timeout_in_ns
from ..device.jit.program import Program, WaitParams

_program = Program(Path(__file__).parent / "kernel.cu")
_VECTOR = 16
_THREADS, _AT_ONCE = 512, 4  # as in kernel.cu
_MOST_BLOCKS = 64
_MOST_LAUNCHES = 4096  # kept before all are dropped


class _Params(ctypes.Structure):
    """The twin of ``Params`` in kernel.cu."""

    _fields_ = (
        ("watch", WaitParams),
        ("count", ctypes.c_uint64),
        ("told", ctypes.c_uint64),
        ("ticket", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("vectors", ctypes.c_uint64),
        ("awaited", ctypes.c_uint32),
        ("peer", ctypes.c_uint32),
        ("tail", ctypes.c_uint32),
        ("step", ctypes.c_uint32),
    )


class CudaTransfers:
    """The engine of one heap.

    Attributes:
        copy_engine_from: bytes from which a copy engine moves contiguous data.
        dependent: whether kernels are launched while the one before them still runs (WEFT_PDL=1).
    """

    def __init__(self, registry: Registry) -> None:
        self._heap, self._semaphores = registry.heap, registry.semaphores
        # On 2 H200 the lines through 16 and 256 MiB meet at 44 to 78 MiB (bench/results/h200-x2-transfers.txt).
        self.copy_engine_from = 48 << 20
        self.dependent = is_on("WEFT_PDL")
        self._launches: dict[Any, Callable[[int], None]] = {}
        with cuda_state.state.make_current(self._heap.device):
            for name in ("post", "await", "move"):
                _program.function(name)

    def signal(self, of: Registration, peer: int) -> None:
        self._begin(of, "signal")
        self._run("post", of, peer, (SENT, ALLOWED))

    def wait(self, of: Registration, peer: int) -> None:
        self._begin(of, "wait")
        self._run("await", of, peer, (WAITED, DONE))

    def move(self, of: Registration, access: Access) -> None:
        self._begin(of, access.op)
        remote, local, peer = access.remote, access.local, access.peer
        assert isinstance(remote, torch.Tensor)
        source, target = (local, remote) if access.op == "put" else (remote, local)
        size = local.numel() * local.element_size()
        flat = source.is_contiguous() and target.is_contiguous() and not (local.is_conj() or local.is_neg())
        addresses = (source.data_ptr(), target.data_ptr(), size) if size else (0, 0, 0)
        aligned = addresses[0] % _VECTOR == addresses[1] % _VECTOR == 0
        if flat and aligned and size < self.copy_engine_from:
            self._run("move", of, peer, (MOVED, ALLOWED), addresses)
            return
        self._run("await", of, peer, (MOVED, ALLOWED))
        if flat:
            cuda_state.state.copy(addresses[1], addresses[0], size, self._stream())
        else:
            with torch.no_grad():
                target.copy_(source)
        self._run("post", of, peer, (MOVED, DONE))

    def _begin(self, of: Registration, op: str) -> None:
        slab = self._semaphores.slab(of.slot)
        slab.fault.raise_if_broken(op)
        slab.calls.begins(op, call_site(3))
        if cuda_state.state.is_capturing():
            stream = self._stream()
            graph = cuda_state.state.capture_of(stream)[1]
            if graph not in of.graphs or of.graphs[graph].is_gone():
                of.graphs[graph] = CapturedGraph(stream)

    def _stream(self) -> int:
        stream: int = cuda_state.state.current_stream(self._heap.device.index)
        return stream

    def _run(
        self,
        name: str,
        of: Registration,
        peer: int,
        rows: tuple[int, int],
        data: tuple[int, int, int] = (0, 0, 0),
    ) -> None:
        """``rows``: that of the count, and that of the word which is awaited here or written at the peer."""
        timeout = timeout_in_ns(self._heap.group_name)
        key = name, of.number, peer, rows, data, timeout
        launch = self._launches.get(key)
        if launch is None:
            if len(self._launches) >= _MOST_LAUNCHES:
                self._launches.clear()
            with cuda_state.state.make_current(self._heap.device):
                launch = self._launch(name, of, peer, rows, data)
            self._launches[key] = launch
        launch(self._stream())

    def _launch(
        self, name: str, of: Registration, peer: int, rows: tuple[int, int], data: tuple[int, int, int]
    ) -> Callable[[int], None]:
        heap, semaphores = self._heap, self._semaphores
        slab, slot, there = semaphores.slab(of.slot), of.slot, (peer - heap.rank) * heap.span
        count, word = rows
        # Whose access it is, at the peer; `move` awaits one word and tells another.
        told = DONE if name == "move" else word
        source, target, size = data
        params = _Params(
            WaitParams.of(slab, timeout_in_ns(heap.group_name)),
            semaphores.address(slot, count, peer),
            semaphores.address(slot, told, heap.rank) + there if name != "await" else 0,
            semaphores.address(slot, TICKET, peer),
            source,
            target,
            size // _VECTOR,
            slab.layout.index(slot, word, peer),
            peer,
            size % _VECTOR,
            int(count == SENT),
        )
        function = _program.function(name)
        if name != "move":
            return function.bound(1, 32, params, dependent=self.dependent)
        blocks = max(1, min(_MOST_BLOCKS, -(-params.vectors // (_THREADS * _AT_ONCE))))
        return function.bound(blocks, _THREADS, params, dependent=self.dependent)
