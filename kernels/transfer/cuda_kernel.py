"""Launches kernel.cu: signal, wait, put and get between registered tensors on CUDA, in the current stream's order.

Little data is moved by one kernel, which waits, copies and tells; much by a copy engine, between a kernel that waits
and one that tells; what is not contiguous on both sides by torch's copy kernel between the same two. Of a batch what is
little is moved by one kernel together.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...symm_mem.backends import cuda_state
from ...symm_mem.errors import HeapUnavailable
from ...symm_mem.heap.captured import CapturedGraph
from ...symm_mem.registration.engine import Access
from ...symm_mem.registration.registry import Registration, Registry
from ...symm_mem.registration.semaphores import ALLOWED, DONE, MOVED, SENT, TICKET, WAITED
from ...symm_mem.switches import is_on
from ...symm_mem.timeouts import timeout_in_ns
from ..device.capability import why_no_kernel_on
from ..device.jit.program import Program, WaitParams, fields

_program = Program(Path(__file__).parent / "kernel.cu")
_VECTOR = 16
_AT_ONCE, _MOST_THREADS = 4, 1024  # as in kernel.cu
_THREADS = 512  # of a block that is not alone
_MOST_BLOCKS = 64
_MOST_AT_ONCE = 32  # transfers of one launch, as in kernel.cu
_MOST_BLOCKS_AT_ONCE = 128  # of all of them: fewer than a GPU of 132 SMs holds
_MOST_LAUNCHES = 4096  # kept before all are dropped


class _Transfer(ctypes.Structure):
    """The twin of ``Transfer`` in kernel.cu."""

    _fields_ = (
        *fields(ctypes.c_uint64, "count told ticket source target vectors"),
        *fields(ctypes.c_uint32, "awaited peer tail step first blocks ours reserved"),
    )


class _Params(ctypes.Structure):
    """The twin of ``Params``."""

    _fields_ = (("watch", WaitParams), ("of", _Transfer))


class _Batch(ctypes.Structure):
    """The twin of ``Batch``."""

    _fields_ = (
        ("watch", WaitParams),
        *fields(ctypes.c_uint32, "transfers reserved"),
        ("of", _Transfer * _MOST_AT_ONCE),
    )


class _Data(NamedTuple):
    """Contiguous bytes; ``ours`` if the source is this rank's own."""

    source: int = 0
    target: int = 0
    size: int = 0
    ours: bool = False


_NO_DATA = _Data()


class _Part(NamedTuple):
    """What a launch does through one registered tensor."""

    of: Registration
    peer: int
    data: _Data = _NO_DATA


class _Move(NamedTuple):
    """``flat``: both sides are contiguous, of bytes as they lie."""

    part: _Part
    source: torch.Tensor
    target: torch.Tensor
    flat: bool

    @staticmethod
    def made(of: Registration, access: Access) -> _Move:
        remote, local = access.remote, access.local
        assert isinstance(remote, torch.Tensor)
        source, target = (local, remote) if access.into else (remote, local)
        size = local.numel() * local.element_size()
        flat = source.is_contiguous() and target.is_contiguous() and not (local.is_conj() or local.is_neg())
        data = _Data(source.data_ptr(), target.data_ptr(), size, access.into) if size else _NO_DATA
        return _Move(_Part(of, access.peer, data), source, target, flat)

    def by_sms(self, below: int) -> bool:
        """Whether a kernel of weft moves it: less than ``below`` bytes, in whole vectors."""
        data = self.part.data
        return self.flat and data.source % _VECTOR == data.target % _VECTOR == 0 and data.size < below


class CudaTransfers:
    """The engine of one heap.

    Attributes:
        copy_engine_from: bytes from which a copy engine moves contiguous data.
        most_dependent: blocks of a kernel that is launched while the one before it still runs. By default one, which
            keeps no SM from others; WEFT_PDL says 0 or all.
    """

    def __init__(self, registry: Registry) -> None:
        """
        Raises:
            HeapUnavailable: the kernels do not run on such a GPU.
        """
        if (reason := why_no_kernel_on("transfer", registry.heap.device)) is not None:
            raise HeapUnavailable(f"no transfers on {registry.heap.device}: {reason}")
        self._heap, self._semaphores = registry.heap, registry.semaphores
        # On 2 H200 the lines through 16 and 256 MiB meet at 44 to 78 MiB (bench/results/h200-x2-transfers.txt).
        self.copy_engine_from = 48 << 20
        self.most_dependent = (
            _MOST_BLOCKS_AT_ONCE if is_on("WEFT_PDL") else int(is_on("WEFT_PDL", default=True))
        )
        self._launches: dict[Any, Callable[[int], None]] = {}
        with cuda_state.state.make_current(self._heap.device):
            for name in ("post", "await", "move", "post_all", "await_all", "move_all"):
                _program.function(name)

    def signal(self, signals: list[tuple[Registration, int]], op: str = "signal") -> None:
        self._run_all("post", op, signals, (SENT, ALLOWED))

    def wait(self, waits: list[tuple[Registration, int]], op: str = "wait") -> None:
        self._run_all("await", op, waits, (WAITED, DONE))

    def _run_all(
        self, name: str, op: str, of_each: list[tuple[Registration, int]], rows: tuple[int, int]
    ) -> None:
        for of, _ in of_each:
            self._begin(of, op)
        self._run(name, rows, [_Part(of, peer) for of, peer in of_each])

    def move(self, moves: list[tuple[Registration, Access]]) -> None:
        for of, access in moves:
            self._begin(of, access.op)
        made = [_Move.made(of, access) for of, access in moves]
        little, large = [], []
        for move in made:
            if move.by_sms(self.copy_engine_from):
                little.append(move.part)
            else:
                large.append(move)
        if little:
            self._run("move", (MOVED, ALLOWED), little)
        for move in large:
            self._move(move)

    def _move(self, move: _Move) -> None:
        """By a copy engine or torch's kernel, between two of weft's."""
        around, data = [_Part(*move.part[:2])], move.part.data
        self._run("await", (MOVED, ALLOWED), around)
        if move.flat:
            cuda_state.state.copy(data.target, data.source, data.size, self._stream())
        else:
            with torch.no_grad():
                move.target.copy_(move.source)
        self._run("post", (MOVED, DONE), around)

    def _begin(self, of: Registration, op: str) -> None:
        self._semaphores.slab(of.slot).raise_if_broken(op, 2)
        if cuda_state.state.is_capturing():
            stream = self._stream()
            graph = cuda_state.state.capture_of(stream)[1]
            if graph not in of.graphs or of.graphs[graph].is_gone():
                of.graphs[graph] = CapturedGraph(stream)

    def _stream(self) -> int:
        stream: int = cuda_state.state.current_stream(self._heap.device.index)
        return stream

    def _run(self, name: str, rows: tuple[int, int], parts: list[_Part]) -> None:
        """``rows``: that of the count, and that of the word which is awaited here or written at the peer."""
        for some in [parts] if len(parts) == 1 else self._together(parts):
            which = tuple([(of.number, peer, data) for of, peer, data in some])
            key = name, rows, which, timeout_in_ns(self._heap.group_name)
            launch = self._launches.get(key)
            if launch is None:
                if len(self._launches) >= _MOST_LAUNCHES:
                    self._launches.clear()
                with cuda_state.state.make_current(self._heap.device):
                    launch = self._launches[key] = self._launch(name, rows, some)
            launch(self._stream())

    def _together(self, parts: list[_Part]) -> Iterator[list[_Part]]:
        """Those of a slab, as many as go into one launch."""
        slabs: dict[int, list[_Part]] = {}
        for part in parts:
            slabs.setdefault(self._semaphores.slab(part.of.slot).address, []).append(part)
        for some in slabs.values():
            for i in range(0, len(some), _MOST_AT_ONCE):
                yield some[i : i + _MOST_AT_ONCE]

    def _launch(self, name: str, rows: tuple[int, int], parts: list[_Part]) -> Callable[[int], None]:
        count, moves = len(parts), name == "move"
        transfers = [self._transfer(name, rows, part, count) for part in parts]
        blocks, threads = (0, _THREADS) if moves else (1, 32)
        for transfer in transfers if moves else ():
            transfer.first = blocks
            blocks += transfer.blocks
        if moves and blocks == 1:
            threads = min(_MOST_THREADS, max(32, -(-transfers[0].vectors // 32) * 32))
        slab = self._semaphores.slab(parts[0].of.slot)
        watch = WaitParams.of(slab, timeout_in_ns(self._heap.group_name))
        params: ctypes.Structure = _Params(watch, *transfers[:1])
        if count > 1:
            name, params = f"{name}_all", _Batch(watch, count, 0, (_Transfer * _MOST_AT_ONCE)(*transfers))
        dependent = blocks <= self.most_dependent
        return _program.function(name).bound(blocks, threads, params, dependent=dependent)

    def _transfer(self, name: str, rows: tuple[int, int], part: _Part, at_once: int) -> _Transfer:
        heap, semaphores, (of, peer, data) = self._heap, self._semaphores, part
        slot, (count, word) = of.slot, rows
        # At the peer whose access it is; what moves awaits one word and tells another.
        told = semaphores.address(slot, DONE if name == "move" else word, heap.rank)
        told += (peer - heap.rank) * heap.span
        vectors = data.size // _VECTOR
        most_blocks = min(_MOST_BLOCKS, _MOST_BLOCKS_AT_ONCE // at_once)
        # As long as the threads of one block hold all vectors at once: several wait for the last.
        most_alone = _AT_ONCE * (_MOST_THREADS if most_blocks == _MOST_BLOCKS else _THREADS)
        return _Transfer(
            semaphores.address(slot, count, peer),
            0 if name == "await" else told,
            semaphores.address(slot, TICKET, peer),
            data.source,
            data.target,
            vectors,
            semaphores.slab(slot).layout.index(slot, word, peer),
            peer,
            data.size % _VECTOR,
            int(count == SENT),
            0,
            1 if vectors <= most_alone else min(most_blocks, -(-vectors // _THREADS)),
            data.ours,
            0,
        )
