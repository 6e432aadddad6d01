"""What launchers of kernels around ll_exchange.cuh share."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..jit.program import Function
from .ll_exchange import dependent

P = TypeVar("P", bound=ctypes.Structure)  # with a field ``slots``


class ExchangeLauncher(ABC, Generic[P]):
    """A kernel on one workspace and one problem: prepared once, launched often.

    Attributes:
        grids: the blocks of a launch, once for each epoch that it takes.
    """

    def __init__(self) -> None:
        self.grids: tuple[int, ...] = ()
        self._params: list[P] = []
        self._launches: list[Callable[[int], None]] = []
        self._timeout_ns = 0
        self._lock = threading.Lock()  # a launch takes what stands in its struct

    def _prepare(self, function: Function, blocks: int, threads: int, params: P) -> None:
        self._launches.append(function.bound(blocks, threads, params, dependent=dependent()))
        self._params.append(params)

    @abstractmethod
    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        """Writes the addresses into the structs of a launch, and returns that."""

    def launch(
        self, buffer: int, operands: Sequence[int], results: Sequence[int], timeout_ns: int, stream: int
    ) -> None:
        """The whole call.

        Every rank makes the same calls on a workspace, in one order and on one stream at a time. Safe to capture in a
        CUDA graph. The current device must be that of the tensors.

        Args:
            buffer: not used; epochs alternate by themselves.
            operands, results: addresses, as the class says.
            timeout_ns: nanoseconds until a wait for a peer expires, see the workspace's record.
            stream: a CUstream as an integer.

        Raises:
            RuntimeError: the kernel cannot be launched.
        """
        with self._lock:
            if timeout_ns != self._timeout_ns:
                params: Any
                for params in self._params:
                    params.slots.watch.timeout_ns = timeout_ns
                self._timeout_ns = timeout_ns
            self._put(operands, results)(stream)
