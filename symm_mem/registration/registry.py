"""The registrations of one heap: which tensors of each rank are peers, agreed on by all ranks.

Registering is collective. A tensor that is registered already is found without a word to the others: at every call each
rank writes to its page (rank_pages.py) which of the tensors it knows, and one that does not know all of them compares
that. For others there is one exchange for all tensors of the call: each rank posts where its
tensors lie; all find from the same posts and the same table which segments are new, and map those. What a rank has
dropped it says along with that, once its queued work is done; a registration ends when all have dropped it, on all
ranks in the same step. Until then the memory is kept. docs/protocol.md#registered-tensors
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ..bootstrap.fd_exchange import close_fds, exchange_many
from ..errors import WeftError, describe
from ..failure.rank_pages import RankPages
from ..heap.mapped_range import close_what_is_gone
from .cross_process import Probe, probe
from .local import OwnSegments, RegisteredBatch
from .segments import (
    KnownSegment,
    Mapping,
    Place,
    Segment,
    SegmentKey,
    SegmentTable,
    read_place,
    read_segment,
)
from .semaphores import Semaphores

if TYPE_CHECKING:
    from ..heap.heap import Heap

_KEPT, _ENTRY = 64, 256  # calls that stand on a page, and bytes of each


@dataclass(eq=False)
class Registration:
    """A tensor of each rank. ``keep``: this rank's memory.

    Attributes:
        number: the same on all ranks, and never used again.
        slot: of its semaphores.
        places: where each rank's tensor lies.
        keys: the segment of each rank's.
        closed: whether it has ended.
    """

    number: int
    slot: int
    places: list[Place]
    keys: list[SegmentKey]
    keep: Any = field(repr=False)
    closed: bool = False
    graphs: dict[int, Any] = field(
        default_factory=dict, repr=False
    )  #: captured ones that use it, by their numbers

    def in_graph(self) -> bool:
        """Whether a captured graph is there that may be replayed."""
        self.graphs = {number: graph for number, graph in self.graphs.items() if not graph.is_gone()}
        return bool(self.graphs)

    def named(self, rank: int) -> str:
        """For errors: that of one rank."""
        return f"tensor {self.number}, {self.places[rank]} on rank {rank},"


class Registry:
    """Of one heap. Making one is collective."""

    def __init__(self, heap: Heap) -> None:
        self.heap = heap
        what = "the pages of registrations", "its count of registrations"
        self.hits = RankPages(heap, _KEPT, _ENTRY, what)  #: which tensors of each call a rank knows
        self.table = SegmentTable()
        self.own = _own_segments(heap, self.table)
        self.semaphores = Semaphores(heap)
        self.entries: dict[int, Registration] = {}
        self.falling: deque[int] = deque()  #: dropped since the last call: finalizers run at any moment
        self._dropped: set[int] = set()
        self._leaving: list[Any] = []  # memory that peers are about to unmap
        self._number = 0
        self._probe = Probe()
        self._copies = False  # whether the ranks have tried to copy from each other's processes

    def add(self, tensors: list[torch.Tensor]) -> list[Registration]:
        """Register tensors of which no rank knows any. Collective.

        Raises:
            RankMismatch: ranks come with another number of tensors, or with other dtypes.
            WeftError: the memory of a rank cannot be reached, in its words.
            PeerTimeout: a rank does not come.
        """
        heap = self.heap
        with heap.lock, heap.rendezvous.poison_on_error("register"):
            batch, problem = RegisteredBatch(), None
            try:
                try:
                    self.own.describe(tensors, batch)
                except Exception as e:
                    problem = describe(e)
                return self._add(tensors, batch, problem)
            finally:
                batch.close()

    def _add(
        self, tensors: list[torch.Tensor], batch: RegisteredBatch, problem: str | None
    ) -> list[Registration]:
        rendezvous = self.heap.rendezvous
        posts = self._meet(
            "register",
            {
                "problem": problem,
                "alike": {"tensors": len(tensors), "dtypes": [place.dtype for place in batch.places]},
                "segments": [list(d.segment) for d in batch.segments],
                "places": [list(place) for place in batch.places],
                "probe": self._probe.post,
            },
        )
        segments = [[read_segment(r, s) for s in post["segments"]] for r, post in enumerate(posts)]
        places = [[read_place(r, p, segments[r]) for p in post["places"]] for r, post in enumerate(posts)]
        if any(len(each) != len(tensors) for each in places):
            raise WeftError(
                f"register in group {self.heap.group_name!r}: a rank has posted other tensors than it says"
            )
        new = [[s for s in each if (rank, s.key) not in self.table] for rank, each in enumerate(segments)]
        if not self._copies and any(s.kind == "process" for each in new for s in each):
            probes = [post["probe"] for post in posts]
            rendezvous.run_on_all("reach the memory of all ranks", lambda: self._try_copies(probes))
            self._copies = True
        slots = self.semaphores.free(len(tensors), {entry.slot for entry in self.entries.values()})
        found = self._map(new, batch, slots)
        made = []
        # All ranks have completed every step: from here on nothing can fail.
        for i, tensor in enumerate(tensors):
            each = [places[rank][i] for rank in range(self.heap.world_size)]
            keys = [(rank, segments[rank][place.segment].key) for rank, place in enumerate(each)]
            for key, place in zip(keys, each, strict=True):
                told = segments[key[0]][place.segment]
                self.table.use(key, told, lambda key=key: found[key])  # type: ignore[misc]
            self._number += 1
            entry = Registration(self._number, slots[i], each, keys, tensor.untyped_storage())
            self.entries[entry.number] = entry
            self.semaphores.named[entry.slot] = entry.named
            made.append(entry)
        return made

    def _map(
        self, new: list[list[Segment]], batch: RegisteredBatch, slots: list[int]
    ) -> dict[SegmentKey, KnownSegment]:
        """Map the new segments of all ranks, and zero this rank's words of the slots."""
        heap, rendezvous = self.heap, self.heap.rendezvous
        counts = [sum(len(s.parts) for s in each) for each in new]
        mine = {s.key for s in new[heap.rank]}
        keep = {d.segment.key: d.keep for d in batch.segments}
        give = [fd for d in batch.segments if d.segment.key in mine for fd in d.fds]
        taken: list[list[int]] = [[] for _ in new]
        found: dict[SegmentKey, KnownSegment] = {}

        def open_all() -> None:
            self.semaphores.zero(slots)
            for rank, each in enumerate(new):
                left = iter(taken[rank])
                for segment in each:
                    fds = [next(left) for _ in segment.parts]
                    if rank == heap.rank:
                        mapping = Mapping(None, keep[segment.key])
                    else:
                        mapping = self.own.open(rank, segment, fds)
                    found[rank, segment.key] = KnownSegment(rank, segment, mapping)

        try:
            if any(counts):
                taken = exchange_many(rendezvous, give, heap.secret, counts)
            rendezvous.run_on_all("map the memory of all ranks", open_all)
        finally:
            for fds in taken:
                if fds is not give:
                    close_fds(fds)
        return found

    def _try_copies(self, probes: list[Any]) -> None:
        for rank, post in enumerate(probes):
            if rank != self.heap.rank:
                probe(rank, self.heap.rendezvous.processes[rank], post)

    def end(self, numbers: list[int]) -> None:
        """End registrations. Collective: all ranks name the same.

        Raises:
            RankMismatch: a rank names others.
            PeerTimeout: a rank does not come.
            WeftError: a rank is capturing a CUDA graph, or has one that uses a tensor.
        """
        with self.heap.lock, self.heap.rendezvous.poison_on_error("unregister"):
            self._meet("unregister", {"problem": None, "alike": {"tensors": numbers}}, numbers)
            if self._leaving:
                self.heap.rendezvous.gather("unmap", None)
                self._leaving.clear()

    def _meet(self, what: str, said: dict[str, Any], ending: Sequence[int] = ()) -> list[Any]:
        """Post ``said``, which has what must be alike, and what this rank has dropped.

        Where all ranks say the same, what all have dropped is released, and ``ending``.
        """
        while self.falling:
            self._dropped.add(self.falling.popleft())
        self._dropped &= self.entries.keys()
        # What this rank has enqueued may still work on peers' tensors.
        quiet = not (self._dropped or ending) or self.heap.backend.quiesce()
        replayed = [number for number in (*ending, *self._dropped) if self.entries[number].in_graph()]
        if ending and not quiet:
            said["problem"] = "a CUDA graph is being captured"
        elif kept := set(replayed).intersection(ending):
            said["problem"] = (
                f"a captured CUDA graph uses registered tensor {min(kept)}; drop the graph first"
            )
        said["dropped"] = sorted(self._dropped.difference(replayed)) if quiet else []
        rendezvous = self.heap.rendezvous
        posts = rendezvous.gather(what, said)
        self._leaving.clear()  # all have come here after the step in which they have unmapped it
        rendezvous.refuse(what, [post["problem"] for post in posts])
        rendezvous.check_equal(what, [post["alike"] for post in posts])
        dropped = set.intersection(*(set(post["dropped"]) for post in posts))
        for number in sorted(dropped.union(ending) & self.entries.keys()):
            self._release(number)
        close_what_is_gone(quiet=self.heap.backend if dropped or ending else None)
        return posts

    def _release(self, number: int) -> None:
        entry = self.entries.pop(number)
        if self.own.outlives_peers:
            self._leaving.append(entry.keep)
        entry.closed, entry.keep = True, None
        self._dropped.discard(number)
        self.table.give_back(entry.keys)

    @property
    def had(self) -> list[Any]:
        """For all ranks, when the heap is being reset: the last number, the slabs, the registrations."""
        return [self._number, len(self.semaphores.slabs), sorted(self.entries)]

    def keep_what_all_have(self, found: list[Any]) -> None:
        """An error may have left some ranks with what others lack, which nobody was given."""
        self._number = max(number for number, _, _ in found)
        del self.semaphores.slabs[min(slabs for _, slabs, _ in found) :]
        common = set.intersection(*(set(numbers) for _, _, numbers in found))
        for number in [number for number in self.entries if number not in common]:
            entry = self.entries.pop(number)
            entry.closed, entry.keep = True, None
        self.table.keep_only(dict(Counter(key for entry in self.entries.values() for key in entry.keys)))


def _own_segments(heap: Heap, table: SegmentTable) -> OwnSegments:
    if heap.device.type == "cuda":
        from .cuda_segments import CudaSegments

        return CudaSegments(heap, table)
    from .host_segments import HostSegments

    return HostSegments(heap, table)
