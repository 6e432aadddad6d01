"""One-shot exchanges of chunks between all ranks, for cuBLAS's matmuls: what the launchers of both ops share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch

from ....symm_mem.backends.cuda_state import current_stream_of
from ....symm_mem.workspace import Workspace
from ..comm.ll_exchange import BLOCKS, THREADS, VECTOR, WARP, ExchangeLayout, exchange_grid, slots_for, up
from ..jit.program import Program

C = TypeVar("C")

MOST_BYTES = 32 << 20  #: gathered or scattered in all; beyond, the kernels that overlap are faster

# Microseconds of an exchange of nothing, and bytes that a rank sends a microsecond between two and between more.
# Fitted to which kernel is faster, of 193 matmuls between 2 H200 (bench/results/h200-x2-choices.txt). Between 4, 13
# calls took 3 to 7 us more than the limit and the bytes; what is lacking here is what the model of cuBLAS has too much.
_EXCHANGE, _OF_TWO, _OF_MORE = 3.0, 300e3, 305e3


@dataclass(frozen=True)
class OneShotConfig:
    """``vectors`` of 16 bytes go from each rank to each, through at most ``blocks`` of ``threads``. The same on all
    ranks."""

    algorithm: ClassVar[str] = "one_shot"
    vectors: int
    blocks: int = BLOCKS
    threads: int = THREADS

    def layout(self, world_size: int) -> ExchangeLayout:
        """A workspace with room for them in one launch."""
        slots = up(slots_for(self.vectors, self.blocks, self.threads), 2 * WARP)
        return ExchangeLayout(world_size, slots, self.blocks)


def config(part: int, num_sms: int) -> OneShotConfig:
    """For parts of so many bytes, in ``num_sms`` blocks at most: they keep their SMs while they wait."""
    return OneShotConfig(part // VECTOR, min(BLOCKS, num_sms))


def algorithm_of(config: object) -> str:
    """What a configuration is one of: what it says, or "push", by the kernels that overlap."""
    said: str = getattr(config, "algorithm", "push")
    return said


def likeliest(ranked: Sequence[tuple[float, C]], preferred: str | None) -> tuple[float, C]:
    """The fastest candidate and its predicted microseconds, of the preferred algorithm if there is one."""
    return next(((us, c) for us, c in ranked if algorithm_of(c) == preferred), ranked[0])


def exchange_us(sent: int, world_size: int) -> float:
    """Microseconds of an exchange in which each rank sends so many bytes."""
    return _EXCHANGE + sending_us(sent, world_size)


def sending_us(sent: int, world_size: int) -> float:
    """What of it grows with the bytes."""
    return sent / (_OF_TWO if world_size == 2 else _OF_MORE)


class OneShotCall(ABC):
    """One exchange beside torch's products, on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``config.layout``, the same call site on every rank.
        config: the same on every rank.
        function: the kernel's name in ``program``; ``params`` are its arguments, but for addresses.

    Raises:
        ValueError: the workspace is too small.
    """

    op: str  #: what errors say

    def __init__(
        self,
        workspace: Workspace[ExchangeLayout],
        config: OneShotConfig,
        program: Program,
        function: str,
        params: Any,
    ) -> None:
        self.workspace, self._params, self._timeout_ns = workspace, params, 0
        layout = workspace.layout
        if not layout.holds(needed := config.layout(layout.world_size)):
            raise ValueError(f"workspace: is {layout}, must hold {needed} for {config}")
        blocks, threads = exchange_grid(config.vectors, layout.slots, config.blocks, config.threads)
        self._launch, self._grids = program.function(function).bound(blocks, threads, params), (blocks,)

    @abstractmethod
    def _put(self, *addresses: int) -> None:
        """Writes them into the arguments, at once: a store to a ctypes field costs as much."""

    def launch(self, addresses: Sequence[int], timeout_ns: int, stream: int) -> None:
        """The exchange alone."""
        with self.workspace.lock:
            if timeout_ns != self._timeout_ns:
                self._timeout_ns = self._params.slots.watch.timeout_ns = timeout_ns
            self._put(*addresses)
            self._launch(stream)

    def _exchange(self, addresses: Sequence[int], timeout_ns: int, stream: int) -> None:
        """The exchange as a part of a call.

        Raises:
            PeerTimeout, CallAbandoned: as ``Workspace.raise_if_broken``.
        """
        # Four frames: this, the call, and two more, on the fast path and on the slow one.
        self.workspace.raise_if_broken(self.op, inside=4, grids=self._grids)
        try:
            self.launch(addresses, timeout_ns, stream)
        except BaseException as e:
            self.workspace.abandon(e)  # the peers may wait for what was not launched
            raise


def launch_prepared(
    workspace: Workspace[Any],
    config: object,
    kernel: Any,
    given: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    timeout_ns: int,
) -> None:
    """Launches, on the current stream, what was made for a configuration: a kernel that overlaps, or a call around
    torch's products."""
    stream = current_stream_of(given[0])
    if algorithm_of(config) != "push":
        kernel.call(given, results, timeout_ns, stream)
        return
    operands, addresses = ([x.data_ptr() for x in tensors] for tensors in (given, results))
    kernel.launch(workspace.next_buffer(), operands, addresses, timeout_ns, stream)
