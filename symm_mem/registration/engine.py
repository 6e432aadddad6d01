"""What moves data and counts in the order of a stream: between CPU ranks here, on CUDA by a kernel's launcher."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from ... import hooks
from ..call_site import call_site, text
from ..errors import PeerTimeout, PeerWait, WaitOutcome
from ..failure.fault import fault_of
from .cross_process import ProcessTensor
from .semaphores import ALLOWED, DONE, MOVED, SENT, WAITED

if TYPE_CHECKING:
    from .registry import Registration, Registry


@dataclass(frozen=True)
class Access:
    """``put``, ``batch_put`` or ``get``: between a tensor of ``peer`` and one of this rank like it."""

    op: str
    peer: int
    remote: torch.Tensor | ProcessTensor
    local: torch.Tensor

    @property
    def into(self) -> bool:
        """Whether the data go to the peer."""
        return self.op != "get"


class TransferEngine(Protocol):
    """See semaphores.py for the protocol. Of several at once none is there twice; ``peer`` may be this rank."""

    def signal(self, signals: list[tuple[Registration, int]], op: str = "signal") -> None:
        """Let each ``peer`` access this rank's tensor once more, after all that this rank has done."""
        ...

    def wait(self, waits: list[tuple[Registration, int]], op: str = "wait") -> None:
        """Until the next access of each ``peer`` to this rank's tensor is over."""
        ...

    def move(self, moves: list[tuple[Registration, Access]]) -> None:
        """Wait until the owner lets this rank access its tensor once more; move; tell the owner. In any order."""
        ...


def make_engine(registry: Registry) -> TransferEngine:
    """On CUDA it launches kernels, which symm_mem does not import."""
    if registry.heap.device.type == "cpu":
        return HostEngine(registry)
    engine: TransferEngine = hooks.cuda_transfers(registry)
    return engine


class HostEngine:
    """Between CPU ranks: plain copies and plain stores, whose order x86-64 keeps; waits spin."""

    def __init__(self, registry: Registry) -> None:
        self._heap, self._semaphores = registry.heap, registry.semaphores
        self._fault = fault_of(registry.heap)

    def signal(self, signals: list[tuple[Registration, int]], op: str = "signal") -> None:
        for of, peer in signals:
            with self._fault.whole(op):
                sent = self._word(of, SENT, peer)
                sent.value += 1
                self._at(of, ALLOWED, peer).value = sent.value

    def wait(self, waits: list[tuple[Registration, int]], op: str = "wait") -> None:
        for of, peer in waits:
            with self._fault.whole(op):
                waited = self._word(of, WAITED, peer)
                expected = (waited.value + 1) & 0xFFFFFFFF
                self._wait(of, op, peer, DONE, expected)
                waited.value = expected

    def move(self, moves: list[tuple[Registration, Access]]) -> None:
        for of, access in moves:
            with self._fault.whole(access.op):
                moved = self._word(of, MOVED, access.peer)
                expected = (moved.value + 1) & 0xFFFFFFFF
                self._wait(of, access.op, access.peer, ALLOWED, expected)
                moved.value = expected
                try:
                    _copy(access)
                except ProcessLookupError:
                    wait = self._about(of, access.op, access.peer, ALLOWED, expected)
                    gone = PeerTimeout(wait, WaitOutcome(expected, 0.0, True))
                    raise self._fault.breaks(gone).again() from None
                self._at(of, DONE, access.peer).value = expected

    def _word(self, of: Registration, row: int, rank: int) -> ctypes.c_uint32:
        return ctypes.c_uint32.from_address(self._semaphores.address(of.slot, row, rank))

    def _at(self, of: Registration, row: int, peer: int) -> ctypes.c_uint32:
        """My word at ``peer``."""
        heap = self._heap
        own = self._semaphores.address(of.slot, row, heap.rank)
        return ctypes.c_uint32.from_address(own + (peer - heap.rank) * heap.span)

    def _wait(self, of: Registration, op: str, peer: int, row: int, expected: int) -> None:
        address = self._semaphores.address(of.slot, row, peer)
        self._fault.wait_until(address, expected, peer, lambda _: self._about(of, op, peer, row, expected))

    def _about(self, of: Registration, op: str, peer: int, row: int, expected: int) -> PeerWait:
        heap, layout = self._heap, self._semaphores.slab(of.slot).layout
        flag = layout.describe(layout.index(of.slot, row, peer))
        return PeerWait(op, heap.group_name, heap.rank, peer, flag, expected, text(call_site()))


def _copy(access: Access) -> None:
    into, local, remote = access.into, access.local, access.remote
    with torch.no_grad():
        if isinstance(remote, ProcessTensor):
            remote.write(local) if into else remote.read(local)
        elif into:
            remote.copy_(local)
        else:
            local.copy_(remote)
