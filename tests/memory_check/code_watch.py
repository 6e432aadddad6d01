"""What generated code that verifies its memory calls: allocations, frees and reuse are compared with what was planned.

A name of the generated code holds the memory of the tensor, or tensors, that it stands for. When the last name of some
memory is deleted it must be gone. When memory is used again under another name nothing else may hold it: neither the
tensor that it was, nor another view of it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from memory_check import report
from memory_check.heap_ranges import HeapRanges
from memory_check.report import comes
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

_log = logging.getLogger("weft.passes")


@dataclass
class _Coalesced:
    """A coalesced collective.

    Attributes:
        pending: its results that were not waited for by their names.
        done: whether one of them was, so that it reads and writes nothing any more.
    """

    pending: set[str]
    done: bool = False


class CodeWatch:
    """Of one run of generated code.

    Attributes:
        problems: what was not as planned, in words.
        peak: bytes of all names, at most.
    """

    def __init__(self, *inputs: Any) -> None:
        self.problems: list[str] = []
        self.peak = 0
        self._names: dict[str, list[StorageWeakRef]] = {}
        self._sizes: dict[int, int] = {}  # by storage
        self._inputs = [StorageWeakRef(t.untyped_storage()) for t in inputs if isinstance(t, Tensor)]
        self._dying: list[tuple[str, StorageWeakRef, int]] = []
        self._before: dict[str, Any] = {}
        self._in_heap = HeapRanges()
        self._calls: dict[str, _Coalesced] = {}  # by operand and by result

    def made(self, name: str, value: Any, size: int | None, within: Collection[str] | None = ()) -> None:
        """A name stands for a tensor, or several, from here on.

        Args:
            size: bytes that were planned; None where that is not known.
            within: names in whose memory it was planned to lie; none for new memory, None for any.
        """
        tensors = [t for t in tree_leaves(value) if isinstance(t, Tensor)]
        storages = [StorageWeakRef(t.untyped_storage()) for t in tensors]
        for tensor, ref in zip(tensors, storages, strict=True):
            nbytes = tensor.untyped_storage().nbytes()
            known = self._holders(ref)
            external = any(ref.cdata == each.cdata for each in self._inputs)
            if nbytes and within is not None and (known or external) and not set(within) & set(known):
                other = known[0] if known else "an input"
                self.problems.append(f"{name} lies in the memory of {other}, which was not planned")
            if size is not None and nbytes != size:
                self.problems.append(f"{name} has {nbytes} bytes, {size} were planned")
            if not external:
                self._sizes[ref.cdata] = nbytes
        self._names[name] = storages
        self._note_peak()

    def started(self, token: str) -> None:
        """A gather was started."""
        self._in_heap.start(token)

    def placed(self, name: str, tensor: Tensor, token: str) -> None:
        """A name stands for memory of the heap until it is released."""
        if (other := self._in_heap.come(name, tensor, token)) is not None:
            self.problems.append(f"{name} has come to where {other} was on the heap")

    def released(self, name: str) -> str:
        """What a name stands for is read no more. The name stands for no tensor from here on, so a reader raises."""
        self._in_heap.leave(name)
        return f"{name}, which was released"

    def begun(self, operands: list[str], results: list[str]) -> None:
        """A coalesced collective was started, which holds operands and results until each of these is waited for."""
        call = _Coalesced({*results})
        self._calls |= dict.fromkeys([*operands, *results], call)

    def waited(self, result: str) -> None:
        """A result was waited for. Of a coalesced collective all are there with the first one."""
        if (call := self._calls.get(result)) is not None:
            call.pending.discard(result)
            call.done = True

    def alone(self, name: str, tensor: Tensor) -> Tensor:
        """Another tensor of memory that is about to be used again. Whatever holds the one given then shows."""
        if name in self._names:
            self._before[name] = torch._C._WeakTensorRef(tensor)  # type: ignore[attr-defined]
        return tensor.detach()

    def reused(self, old: str, new: str, tensor: Tensor) -> None:
        """The memory of one name is that of another one from here on."""
        storages = self._names.pop(old, None)
        if storages is None:
            return  # an input's, which its owner may hold
        self._names[new] = storages
        before, call = self._before.pop(old), self._calls.pop(old, None)
        if any(name != new for ref in storages for name in self._holders(ref)):
            return  # planned so: another name is there for it
        if call is not None and call.done and call.pending:
            self._calls[new] = call
            return  # it only holds it
        if not comes(lambda: before.expired() and _held(tensor) == 1):
            self.problems.append(f"{old} is used again as {new} while something still holds it")

    def freed(self, name: str) -> None:
        """A name was deleted."""
        for ref in self._names.pop(name, ()):
            external = any(ref.cdata == each.cdata for each in self._inputs)
            if not external and not self._holders(ref):
                self._dying.append((name, ref, self._sizes.pop(ref.cdata, 0)))

    def settle(self) -> None:
        """Before what allocates: what was freed must be gone."""
        dying, self._dying = self._dying, []
        for name, ref, size in dying:
            call = self._calls.get(name)
            if call is not None and call.done and call.pending:
                self._dying.append((name, ref, size))  # when all of its results were waited for
            elif not comes(ref.expired):
                self.problems.append(f"the {size} bytes of {name} are still held after its end")

    def end(self, planned: int | None) -> None:
        """
        Args:
            planned: bytes of the peak; None where sizes are not known.

        Raises:
            AssertionError: something was not as planned.
        """
        self.settle()
        _log.info("memory of generated code verified: peak %d bytes, %s planned", self.peak, planned)
        if planned is not None and self.peak != planned:
            self.problems.append(f"the peak was {self.peak} bytes, {planned} were planned")
        if self.problems:
            raise AssertionError(f"generated code's memory is not as planned: {report.shown(self.problems)}")

    def _holders(self, ref: StorageWeakRef) -> list[str]:
        return [name for name, refs in self._names.items() if any(r.cdata == ref.cdata for r in refs)]

    def _note_peak(self) -> None:
        there = {ref.cdata for refs in self._names.values() for ref in refs}
        self.peak = max(self.peak, sum(self._sizes.get(cdata, 0) for cdata in there))


def _held(tensor: Tensor) -> int:
    """How many tensors have this one's memory, with it."""
    own = torch.empty(1)
    beside = torch._C._storage_Use_Count(own.untyped_storage()._cdata) - 1  # what asks
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)) - int(beside)
