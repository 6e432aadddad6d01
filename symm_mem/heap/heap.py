"""One heap for each (group, device): memory that every rank of the group can address.

Each rank reserves one address range for all ranks: rank r's memory lies at ``base + r * span``. An allocation is an
offset, the same on every rank. The heap grows by mapping further chunks after the old ones, on all ranks together:
addresses never move, and what was captured or compiled with them stays valid.

Allocating is collective. Freeing is not: each rank reports at the next allocation what it has dropped, and memory is
used again once every rank has dropped it. docs/protocol.md#allocation has the proof.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup

from .. import forks
from ..backends.base import tensor_over
from ..bootstrap.fd_exchange import close_fds, exchange
from ..bootstrap.handshake import open_together
from ..bootstrap.rendezvous import Rendezvous
from ..call_cache import CachedDict
from ..errors import HeapUnavailable, PeerTimeout, WeftError, describe
from ..timeouts import ThreadLock, get_timeout, preparing_timeout
from .captured import release_gone_graphs
from .mapped_range import MappedRange, close_later, close_what_is_gone
from .placement import Placement, first_gap

ALIGNMENT = 256
T = TypeVar("T")
_PARTS = ("fault", "call_check", "registrations")  # that all ranks make together, when they need them first


@dataclass(eq=False)
class Block:
    """An allocation: ``size`` bytes at ``offset`` of every rank's range. It is dropped when nobody refers to it."""

    heap: Heap
    offset: int
    size: int
    number: int
    __weakref__: Any = field(init=False, repr=False)


class Heap:
    """Memory shared by the ranks of ``group`` on ``device``. Use ``get_heap``, which makes one for each pair.

    Attributes: ``group``, ``device``, ``rank``, ``world_size``, ``span`` (bytes between two ranks' copies of an
    address), ``capacity`` (bytes mapped for each rank).
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self._group = weakref.ref(group)  # its store listens for as long as it lives
        self.group_name = group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self.owner = forks.Owner(group)
        self.lock = ThreadLock(f"a heap of {self.group_name!r}", lambda: preparing_timeout(self.group_name))
        self.callers: dict[int, tuple[str, float]] = {}  #: CPU threads with calls of ops, by ident, and when
        self.rendezvous = Rendezvous(group, f"heap-{device.type}", lambda: get_timeout(self.group_name))
        with self.rendezvous.poison_on_error("make a heap"):
            self.rendezvous.join("make a heap")
            self._make(device)

    @property
    def group(self) -> ProcessGroup | None:
        """None once it is destroyed and nobody keeps it."""
        return self._group()

    def _make(self, device: torch.device) -> None:
        self.backend, self.secret = open_together(self.rendezvous, device)
        self.device = self.backend.device
        self.span = self.backend.span
        self.capacity = 0
        self.peak = 0  #: the most bytes that were in blocks at a time
        #: what the ops above keep for as long as the heap lives
        self.workspaces: CachedDict[Any, Any] = CachedDict()
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()  #: what has state outside of the heap
        self.fault: Any = None  #: of all that is on it: fault.py
        self.watch: Any = None  #: of stream waits, on CUDA
        self.call_check: Any = None  #: of the checked mode
        self.registrations: Any = None  #: of tensors that lie elsewhere
        self._ready: set[Any] = set()
        self._blocks: dict[int, Placement] = {}  # by number: all that is not free
        self._falling: deque[int] = deque()  # dropped since the last allocation: finalizers run at any moment
        self._dropped: set[int] = set()
        # Of captured graphs that are gone: nothing of this rank writes there.
        self._quiesced: set[int] = set()
        self._number = 0
        self._chunks: list[tuple[int, int]] = []  # (offset, size)
        end: Callable[[], Any] | None = None

        def reserve() -> None:
            nonlocal end
            self._range = MappedRange(self.backend, self.span * self.world_size)
            # The process's end unmaps everything anyway, and tensors may outlive this. A forked child has no driver.
            end = forks.finalize(self, close_later, self.backend, self._range.close)

        try:
            self.rendezvous.run_on_all("reserve addresses", reserve)
            if self.backend.to_be_tried:
                self._try_to_share()
        except BaseException:
            if end is not None:  # now: the error's traceback keeps this heap
                end()
            raise

    def _try_to_share(self) -> None:
        """The first chunk, now: without a heap calls run unfused, while an allocation that fails is an error."""
        try:
            self._grow(1)
        except PeerTimeout:
            raise
        except WeftError as e:
            raise HeapUnavailable(f"no heap for group {self.group_name!r}: {e}") from e

    def address(self, rank: int) -> int:
        """Where rank's memory begins in this process."""
        return self._range.base + rank * self.span

    def allocate(self, size: int, tag: str, *, zero: int = 0) -> Block:
        """``size`` bytes at the same offset on every rank. Collective; not for the hot path.

        Args:
            size: bytes, at least 1.
            tag: what it is for; ranks must agree on it.
            zero: the first so many bytes are zero on every rank before any rank returns.

        Raises:
            RankMismatch: the ranks do not ask for the same size and tag.
            PeerTimeout: a rank does not come.
            ForkedProcess: this process was forked from the rank's.
            WeftError: a rank has no memory left; the heap is as before.
        """
        if size < 1:
            raise ValueError(f"size: is {size}, must be at least 1 byte")
        self.owner.refuse_child("allocate")
        with self.lock, self.rendezvous.poison_on_error("allocate"):
            return self._allocate(size, tag, zero)

    def _allocate(self, size: int, tag: str, zero: int) -> Block:
        want = -(-size // ALIGNMENT) * ALIGNMENT
        close_what_is_gone()
        release_gone_graphs(self.workspaces, self._quiesced)
        while self._falling:
            self._dropped.add(self._falling.popleft())
        self._dropped &= self._blocks.keys()
        # Kernels of this rank may still write to peers' copies of what it dropped.
        rest = self._dropped if self._dropped <= self._quiesced or self.backend.quiesce() else self._quiesced
        dropped = sorted(self._dropped & rest)
        posts = self.rendezvous.gather("allocate", [{"bytes": size, "tag": tag}, dropped])
        self.rendezvous.check_equal("allocate", [post[0] for post in posts])
        for number in sorted(set.intersection(*(set(post[1]) for post in posts))):
            self._dropped.discard(number)
            self._quiesced.discard(number)
            del self._blocks[number]
        # The same on all ranks, which have the same blocks.
        offset = first_gap(self._blocks.values(), want)
        if (missing := offset + want - self.capacity) > 0:
            self._grow(missing)
        self._number += 1
        block = Block(self, offset, want, self._number)
        weakref.finalize(block, self._falling.append, block.number)  # first: what is entered can be dropped
        self._blocks[block.number] = Placement(offset, want, zero, tag)
        self.peak = max(self.peak, sum(placed.size for placed in self._blocks.values()))
        if zero:
            self.backend.zero(self.address(self.rank) + offset, zero)
        # Nobody is given a block that a rank has not entered: a reset would take its memory away.
        self.rendezvous.gather("finish an allocation", None)
        return block

    def make_once(self, part: str, make: Callable[[Heap], T], what: str) -> T:
        """A part that all ranks make together when it is first needed.

        Args:
            part: the attribute that keeps it.
            what: the step, for errors.
        """
        with self.lock:
            if getattr(self, part) is None:
                with self.rendezvous.poison_on_error(what):
                    setattr(self, part, make(self))
            made: T = getattr(self, part)
            return made

    def held(self) -> list[Placement]:
        """All blocks but those that this rank has dropped."""
        dropped = {*self._dropped, *self._falling}
        return [placed for number, placed in [*self._blocks.items()] if number not in dropped]

    def prepare(self, what: str, key: Any, step: Callable[[], Any]) -> None:
        """Run what takes its time, a compilation, before the first call that needs it. Collective, once for each key.

        Ranks take different times for it, so they go on together: no wait for a peer counts what it still compiles.

        Args:
            key: what is prepared for. Ranks that make the same calls come with the same keys in the same order.

        Raises:
            PeerTimeout: a rank does not come, or takes longer than half an hour.
            WeftError: it failed on a rank.
        """
        if key in self._ready:
            return
        self.owner.refuse_child(what)
        with self.lock, self.rendezvous.poison_on_error(f"prepare {what}"):
            if key in self._ready:
                return
            self.rendezvous.gather(f"prepare {what}", None)
            self.rendezvous.run_on_all(f"prepare {what}", step, preparing_timeout(self.group_name))
            self._ready.add(key)

    def _grow(self, need: int) -> None:
        """Map another chunk after the last one, on all ranks or on none."""
        unit = self.backend.granularity
        size = max(-(-need // unit) * unit, self.backend.chunk)
        start = self.capacity

        def create() -> tuple[int, Any]:
            if start + size > self.span:
                raise MemoryError(
                    f"the heap's range of {self.span} bytes is used up: {start} in use, {size} more wanted"
                )
            return self.backend.create(size)

        mine: list[tuple[int, Any]] = []
        fds: list[int] = []
        try:
            # Entered before the ranks hear of each other: another one's problem must not leave it open.
            self.rendezvous.run_on_all(f"grow the heap by {size} bytes", lambda: mine.append(create()))
            ((own, handle),) = mine
            fds = exchange(self.rendezvous, own, self.secret)

            def map_all() -> None:
                for rank, fd in enumerate(fds):
                    address = self.address(rank) + start
                    if rank == self.rank:
                        self._range.map(address, handle, size)
                    else:
                        self._range.adopt(address, fd, size)

            self.rendezvous.run_on_all("map memory", map_all)
            self._enter_chunk(start, size)
        except BaseException:
            # What has been entered is there until a reset says otherwise.
            if (start, size) not in self._chunks:
                self._unmap(start, size)
            raise
        finally:
            for own, handle in mine:  # mappings keep the memory
                self.backend.drop(handle)
                close_fds([*fds, own] if own not in fds else fds)

    def _enter_chunk(self, start: int, size: int) -> None:
        self._chunks.append((start, size))
        self.capacity += size

    def _unmap(self, start: int, size: int) -> None:
        for rank in range(self.world_size):
            self._range.unmap(self.address(rank) + start, size)

    def reset(self, here: Rendezvous, session: str) -> None:
        """Zero every word that ranks count in or wait for, on all ranks, and agree on what lies where. Collective.

        What an error has left half-made is dropped: an allocation, a chunk or a workspace that not every rank has.
        Memory and addresses of everything else stay, so captured graphs stay valid. If it fails here, the group is
        broken on this rank: others may count from 0 already.

        Args:
            here: where the ranks that reset have joined.
            session: of what is allocated from then on.

        Raises:
            PeerTimeout: a rank did not come.
            WeftError: a rank could not zero its words, in the driver's words.
        """
        try:
            with self.lock, ExitStack() as held:
                self.rendezvous.begin(session)
                self._reset(here, held)
        except BaseException as e:  # what is half-made is used by nobody until a reset has succeeded
            refused = self.rendezvous.abandon("reset", e)
            if self.fault is not None:
                self.fault.breaks(refused)
            raise

    def _reset(self, here: Rendezvous, held: ExitStack) -> None:
        users = list(self.users)
        problem = self._quiesce(users, held)
        blocks = {str(number): list(placed) for number, placed in self._blocks.items()}
        known = [*self._quiesced, *(workspace.block.number for workspace in self.workspaces.values())]
        made = [part for part in _PARTS if getattr(self, part) is not None]
        had = None if self.registrations is None else self.registrations.had
        posts = here.gather("reset", [problem, blocks, self._chunks, self._number, made, known, had])
        here.refuse("reset", [post[0] for post in posts])
        for part in made:
            if not all(part in post[4] for post in posts):
                setattr(self, part, None)  # an error came while it was made: nothing uses it
        self._keep_what_all_have([post[1] for post in posts], [post[2] for post in posts])
        if self.registrations is not None:
            self.registrations.keep_what_all_have([post[6] for post in posts])
        # Of a workspace all ranks may have the block, and one of them gave up in the last step of making it.
        known_to_all = set.intersection(*(set(post[5]) for post in posts)) & self._blocks.keys()
        for key, workspace in list(self.workspaces.items()):
            if workspace.block.number not in known_to_all:
                del self.workspaces[key]
        self._number = max(post[3] for post in posts)
        self._ready.clear()

        def zero() -> None:
            for placed in self._blocks.values():
                if placed.zero:
                    self.backend.zero(self.address(self.rank) + placed.offset, placed.zero)
            for user in users:
                user.reset_state()

        here.run_on_all("reset", zero)

    def _quiesce(self, users: list[Any], held: ExitStack) -> str | None:
        """Until nothing of this rank writes to a peer any more; or why not. ``held``: releases the locks."""
        try:
            for user in users:
                if (lock := getattr(user, "lock", None)) is not None:
                    # A thread in a call comes out of it: its waits are bounded.
                    if not lock.acquire(timeout=get_timeout(self.group_name)):
                        return "another thread is in a call"
                    held.callback(lock.release)
            if not self.backend.quiesce():
                return "a CUDA graph is being captured"
        except Exception as e:
            return describe(e)
        return None

    def _keep_what_all_have(self, blocks: list[dict[str, list[int]]], chunks: list[list[list[int]]]) -> None:
        """Nobody was given a block that one rank lacks: every rank has entered it before any returns it."""
        common = 0
        while all(len(c) > common and c[common] == chunks[0][common] for c in chunks):
            common += 1
        for chunk in self._chunks[common:]:
            self._unmap(*chunk)
        del self._chunks[common:]
        self.capacity = sum(size for _, size in self._chunks)
        self._blocks = {
            number: placed
            for number, placed in self._blocks.items()
            if all(b.get(str(number)) == list(placed) for b in blocks)
        }
        self._quiesced &= self._blocks.keys()

    def tensor(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        """Rank's memory from ``offset`` on as a contiguous tensor on this rank's device; it keeps ``owner`` alive."""
        # Also in inference mode one that may be written outside of it: by a call that comes later.
        with torch.inference_mode(False):
            tensor = torch.empty(0, dtype=dtype, device=self.device)
        size = math.prod(shape) * dtype.itemsize
        storage = tensor_over(self.address(rank) + offset, size, self.device, owner)
        return tensor.set_(storage, 0, shape)  # type: ignore[call-overload, no-any-return]


def heap_of(tensor: torch.Tensor) -> Block | None:
    """The block whose memory a tensor lies in; None if it lies on no heap.

    Raises:
        TypeError: it is not a tensor.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"tensor: is of type {type(tensor).__name__}, must be a tensor")
    if tensor.layout != torch.strided or isinstance(tensor, FakeTensor):
        return None
    storage = tensor.untyped_storage()
    owner = getattr(storage, "_weft_owner", None)
    if not isinstance(owner, Block):
        return None
    # What moves a storage elsewhere (share_memory_) leaves the owner noted on it.
    begin = owner.heap.address(owner.heap.rank) + owner.offset
    return owner if begin <= storage.data_ptr() < begin + owner.size else None
