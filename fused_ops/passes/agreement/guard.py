"""What a compiled graph asks each time before it runs: may it run fused, or do the ranks stand before different graphs?

Inductor writes the question before everything else in the function that it generates, and with it the fallback:

    weft_turn = weft_guard.turn()
    if weft_turn is None:
        return weft_guard.fallback([arg0_1, arg1_1], ...)

``fallback`` computes what the graph would without the pass: it has the graph as it was, pickled. So the
collectives of that run are those that the other ranks meet in whatever they run instead: the same ones, in the same
order, with the same layouts. Everything is in the generated file, which is what Inductor's caches keep: a rank that
takes its graph from there asks like one that compiled it.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ....symm_mem import get_timeout, resolve_group
from ....symm_mem.groups import native_backends
from ....symm_mem.heap.registry import has_name
from ...dispatch.plan import GraphTurn
from ...dispatch.workspaces import RecordedTurn
from ..kernels_ahead.graph_kernels import KeptCall, KernelsOnTheirWay
from ..records.node import unpacked
from . import outcomes
from .fallback import FallbackRuns
from .reasons import broken_by_leaving, reason_of
from .signature import digest, name_of
from .votes.begun import begun
from .votes.board import ABSENCE, VoteBoard, vote_board
from .votes.vote_rows import ABSENT, LATE, LEFT, NO_BOARD, Answer, Vote

#: Seconds until a rank that does not come is taken to run something else; less if the group's deadline is less.
VOTE_DEADLINE = 30.0
#: What the question's node has in its ``meta``: the sizes that are known when the graph runs.
SIZES = "weft_sizes"
# Backends that make a group's communicator at its first collective, which they cannot while a CUDA graph is captured;
# and where their tensors lie.
_CONNECT_AT_FIRST = {"nccl": "cuda"}
_IN_CAPTURE = (
    "a CUDA graph is being captured, whose replays cannot ask the other ranks; where you know that all ranks capture "
    'and replay alike, FusionPass(agree="capture") fuses there, too'
)


class Voters(NamedTuple):
    """The ranks of a group, and where they vote."""

    group: ProcessGroup
    board: VoteBoard


@dataclass(frozen=True)
class GroupQuestion:
    """A group: how many collectives the graph had in it before the pass, whether any of them was fused or the graph of
    forward and backward changed before, for how many ranks, and ``NUMBERS``."""

    name: str
    count: int
    fused: bool
    size: int
    numbers: int = 0

    def signed(self, signature: int) -> int:
        """Of the graph and the group's numbers."""
        return signature ^ self.numbers & 0xFFFFFFFF


class GraphQuestion(NamedTuple):
    """What a graph's code keeps of what it asks: packed, the argument of ``GraphGuard``.

    Attributes:
        groups: in the order in which they first occur in the graph.
        signature: of the graph that may run fused, as ``sizes`` and ``what``.
        original: the graph as it was, pickled; None if nothing was fused.
        redraws: whether that draws random numbers that another graph draws, too, from the same seed.
        captured: whether the graph may run fused while a CUDA graph is captured, whose replays will not ask.
        unasked: whether the graph may run without asking once all ranks know it.
        recorded: whether Inductor records it in CUDA graphs.
        calls: those whose kernels are compiled when the graph is loaded.
    """

    groups: list[GroupQuestion]
    signature: int
    sizes: list[int | str | None]
    what: list[str]
    original: bytes | None
    redraws: bool
    captured: bool
    unasked: bool
    recorded: bool
    calls: list[KeptCall]


class GraphGuard:
    """Asks for one compiled graph. Made once by the generated module; used by whatever thread runs the graph."""

    def __init__(self, text: str) -> None:
        asks: GraphQuestion = unpacked(text)
        self._groups, self._signature, self._sizes = asks.groups, asks.signature, asks.sizes
        self._signed: tuple[tuple[int, ...], int] | None = None  # sizes, and the signature with them
        self._what, self._captured, self._recorded = asks.what, asks.captured, asks.recorded
        self._original = (
            None if asks.original is None else FallbackRuns(self.name, asks.original, asks.redraws)
        )
        fused = [g for g in self._groups if g.fused]
        # Each group's answer depends on the others': they go round until every rank that shares any of them has the
        # same.
        self._rounds = [*fused, *fused[-2::-1]]
        # Not where the answer of one group's ranks depends on another's.
        self._unasked = asks.unasked and len(self._rounds) < 2
        # Where a rank did not come to this graph in time.
        self._in_vain: weakref.WeakSet[VoteBoard] = weakref.WeakSet()
        # Of each group, the fused one last: there it may run without asking. Empty where it must ask.
        self._known_by: list[tuple[GroupQuestion, weakref.ref[ProcessGroup], weakref.ref[VoteBoard]]] = []
        self._kernels: KernelsOnTheirWay | None = KernelsOnTheirWay(asks.calls)

    @property
    def name(self) -> str:
        return name_of(self._signature)

    def fused(self, sizes: tuple[int, ...] = ()) -> bool:
        """Whether every rank is about to run this graph, and so may run it fused. Every rank gets the same answer.

        A rank that does not come is waited for once: ``VOTE_DEADLINE`` seconds, or the group's deadline if that is
        less; then ``ABSENCE`` seconds. One that has voted, and whose process has ended since, is not waited for.

        Args:
            sizes: those that the graph was compiled without. The ranks must have the same.

        Raises:
            ValueError: a group in which something was fused has another number of ranks than the graph was made for.
            WeftError: this rank or another one has not come to the graph that others have begun to run fused, or has
                other numbers in a graph of forward and backward; all ranks of the group raise it.
        """
        answer = self._runs_known(sizes)
        return self._asks(sizes) if answer is None else answer

    def turn(self, sizes: tuple[int, ...] = ()) -> GraphTurn | None:
        """What the graph holds while it runs fused; None where it must not, as ``fused`` says."""
        if not self.fused(sizes):
            return None
        return RecordedTurn() if self._recorded else GraphTurn()

    def _runs_known(self, sizes: tuple[int, ...]) -> bool | None:
        """The answer where all ranks know the graph; None where this rank must ask."""
        known_by = self._known_by
        if not known_by or _capturing():
            return None
        signature = self.signature(sizes)
        for asked, its_group, its_board in known_by:
            group, board = its_group(), its_board()
            if group is None or board is None or not has_name(group, asked.name):
                return None
            if not asked.fused:
                self._ask(asked, Voters(group, board), signature, can_fuse=False)
            elif not board.known.run(asked.signed(signature), asked.count, begun(group)):
                return None
        outcomes.count_vote(self.name, True, 0.0, known=True)
        return True

    def _asks(self, sizes: tuple[int, ...]) -> bool:
        voters = self._look_up_groups()
        if self._kernels is not None:
            self._kernels.wait(_vote_deadline(self._groups[0].name) / 2)
            self._kernels = None
        begin = time.perf_counter()
        signature = self.signature(sizes)
        agreed = self._agreed(signature, voters)
        outcomes.count_vote(self.name, agreed, time.perf_counter() - begin)
        known_by = []
        if self._unasked and agreed:
            # Ranks of groups in which nothing is fused are told before anything waits.
            for asked in sorted(self._groups, key=lambda g: g.fused):
                group, board = voters[asked.name]
                if asked.fused:
                    board.known.learn(asked.signed(signature))
                known_by.append((asked, weakref.ref(group), weakref.ref(board)))
        self._known_by = known_by
        return agreed

    def runs_unfused(self) -> None:
        """Tells the other ranks that this one runs the graph as it is, with sizes that nobody compares then."""
        self.fused(tuple(0 for size in self._sizes if size is None))

    def signature(self, sizes: tuple[int, ...]) -> int:
        """What this graph posts when it runs with these sizes."""
        signed = self._signed
        if signed is None or signed[0] != sizes:
            now = iter(sizes)
            filled = [next(now) if size is None else size for size in self._sizes]
            signed = self._signed = sizes, digest(f"{self._signature} {filled}")
        return signed[1]

    def _look_up_groups(self) -> dict[str, Voters]:
        """Of each group, by its name: after destroy_process_group another may have it.

        Where something was fused, both ways are for as many ranks as there were. A group in which all was left alone
        goes on as without the pass.
        """
        groups = {asked: resolve_group(asked.name) for asked in self._groups}
        for asked, group in groups.items():
            if asked.fused and group.size() != asked.size:
                raise ValueError(
                    f"graph {self.name}: was made for {asked.size} ranks, group {asked.name!r} has "
                    f"{group.size()}: after torch._dynamo.reset() it is made anew"
                )
        return {asked.name: Voters(group, vote_board(group)) for asked, group in groups.items()}

    def _agreed(self, signature: int, voters: Mapping[str, Voters]) -> bool:
        """Whether all ranks say that the graph may run fused."""
        capturing = _capturing()
        for asked in self._groups:
            if not asked.fused:
                self._ask(asked, voters[asked.name], signature, can_fuse=False)
        if self._original is not None and not capturing:
            self._original.prepare()
        can_fuse = self._captured or not capturing
        if not can_fuse and self._original is not None:
            first = self._rounds[0].name
            outcomes.note(self.name, first, voters[first].board.rank, _IN_CAPTURE)
        for i, asked in enumerate(self._rounds):
            turn = (signature + i) % (1 << 63)
            can_fuse = self._ask(asked, voters[asked.name], turn, can_fuse).fused and can_fuse
        agreed = can_fuse and bool(self._rounds)
        if agreed and not capturing:
            for asked in self._groups:
                if asked.fused and not (board := voters[asked.name].board).connected:
                    _make_connections(voters[asked.name].group)
                    board.connected = True
        return agreed

    def _ask(self, asked: GroupQuestion, voters: Voters, signature: int, can_fuse: bool) -> Answer:
        """One group's ranks. Why they do not agree is noted."""
        group, board = voters
        signature = asked.signed(signature)
        board.tell(signature, self._what)
        patience = _vote_deadline(asked.name)
        if board in self._in_vain:
            patience = min(patience, ABSENCE)
        while True:
            post = Vote(begun(group), asked.count, signature, can_fuse, asked.numbers)
            answer = board.ask(post, patience)
            if answer.why != LEFT:
                break
            if (error := broken_by_leaving(board, group)) is not None:
                raise error
        if can_fuse and not answer.fused:
            if self._original is not None:  # else it runs as it is
                why = reason_of(answer, board, self._what, patience)
                outcomes.note(self.name, asked.name, answer.peer, why)
            if answer.why in (LATE, ABSENT, NO_BOARD):
                self._in_vain.add(board)
        return answer

    def fallback(
        self,
        args: list[Any],
        strides: Sequence[tuple[int, ...] | None],
        objects: Mapping[int, Any] | None = None,
    ) -> tuple[Any, ...]:
        """What the graph would return without the pass.

        Args:
            args: the graph's inputs. The list is emptied: what is not needed any more may be freed.
            strides: of the outputs, as the generated code gives them and the next graph expects them.
            objects: outputs that are no tensors, by their places, for which the kept graph gives None.
        """
        with torch.no_grad():
            assert self._original is not None
            outputs = self._original.run(args, compiles=not _capturing())
            restrided = [_restrided(o, s) for o, s in zip(outputs, strides, strict=True)]
        for i, value in (objects or {}).items():
            restrided[i] = value
        return tuple(restrided)


def _make_connections(group: ProcessGroup) -> None:
    """By all ranks of a group that are about to run fused: so that what is captured later can run unfused."""
    for backend, device in _CONNECT_AT_FIRST.items():
        if backend in native_backends(group):
            # Integers are reduced by the backend itself, also in a group of weft's.
            dist.all_reduce(torch.zeros(1, dtype=torch.int32, device=device), group=group)
    if torch.cuda.is_initialized():
        torch.cuda.current_blas_handle()  # made at cuBLAS's first product, and fused graphs may have none


def _capturing() -> bool:
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def _vote_deadline(group: str) -> float:
    return min(VOTE_DEADLINE, get_timeout(group))


def _restrided(value: Any, stride: tuple[int, ...] | None) -> Any:
    if not isinstance(value, torch.Tensor) or stride is None or value.stride() == stride or not value.numel():
        return value
    out = torch.empty_strided(value.shape, stride, dtype=value.dtype, device=value.device)
    return out.copy_(value)
