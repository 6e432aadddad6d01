"""One heap for each (group, device): memory that every rank of the group can address.

Each rank reserves one address range for all ranks: rank r's memory lies at ``base + r * span``. An allocation is
an offset, the same on every rank, so a pointer on peer r is ``base + r * span + offset``. The heap grows by
mapping further chunks behind the old ones, on all ranks together: addresses never move, and what was captured
or compiled with them stays valid.

Allocating is collective: ranks compare what they ask for through the group's store. Freeing is not: tensors die
at different times on different ranks, so each rank reports at the next allocation what it has dropped, and memory
is used again once every rank has dropped it.
"""

from __future__ import annotations

import secrets
import threading
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .backends import open_backend
from .backends.base import Backend, tensor_over
from .errors import HeapUnavailable
from .free_list import FreeList
from .groups import Group, resolve_group
from .rendezvous import Rendezvous, close_fds
from .timeouts import get_timeout

ALIGNMENT = 256


@dataclass(eq=False)
class Block:
    """An allocation: ``size`` bytes at ``offset`` of every rank's range. It is dropped when nobody refers to it."""

    heap: Heap
    offset: int
    size: int
    number: int
    __weakref__: Any = field(init=False, repr=False)


class Heap:
    """Memory shared by the ranks of ``group`` on ``device``. Use ``heap()``, which makes one for each pair.

    Attributes: ``group``, ``device``, ``rank``, ``world_size``, ``span`` (bytes between two ranks' copies of an
    address), ``capacity`` (bytes mapped for each rank).
    """

    def __init__(self, group: ProcessGroup, device: torch.device) -> None:
        self.group, self.group_name = group, group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self.lock = threading.RLock()
        self.rendezvous = Rendezvous(group, f"heap-{device.type}", lambda: get_timeout(self.group_name))
        self.backend, self._secret = self._open(device)
        self.device = self.backend.device
        self.span = self.backend.span
        self.capacity = 0
        self.workspaces: dict[Any, Any] = {}  #: what the ops above keep for as long as the heap lives
        self._free = FreeList()
        self._blocks: dict[int, tuple[int, int]] = {}  # number -> (offset, size) of all that is not free
        self._falling: deque[int] = deque()  # dropped since the last allocation: finalizers run at any moment
        self._dropped: set[int] = set()
        self._number = 0
        self._base = self._settled(
            "reserve addresses", lambda: self.backend.reserve(self.span * self.world_size)
        )
        self._chunks: list[tuple[int, int]] = []  # (offset, size)
        unmap = weakref.finalize(
            self, _unmap_all, self.backend, self._base, self.span, self.world_size, self._chunks
        )
        unmap.atexit = False  # the process's end unmaps everything anyway, and tensors may outlive this

    def _open(self, device: torch.device) -> tuple[Backend, str]:
        """The backend and the group's secret, or HeapUnavailable on every rank, in the same words."""
        backend: Backend | None = None
        problem: str | None = None
        identity: dict[str, Any] = {}
        try:
            backend = open_backend(device)
            identity = backend.identity()
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
        posts = self.rendezvous.gather(
            "make a heap", {"problem": problem, "identity": identity, "secret": secrets.token_hex(32)}
        )
        for rank, post in enumerate(posts):
            if post["problem"] is not None:
                raise HeapUnavailable(
                    f"no heap for group {self.group_name!r}: rank {rank}: {post['problem']}"
                )
        assert backend is not None
        reason = backend.refuse([post["identity"] for post in posts], self.rank)
        for answer in self.rendezvous.gather("share memory", reason):
            if answer is not None:
                raise HeapUnavailable(f"no heap for group {self.group_name!r}: {answer}")
        return backend, posts[0]["secret"]

    def _settled(self, what: str, step: Callable[[], Any]) -> Any:
        """Run a step that may fail here; if it fails on any rank, every rank raises."""
        problem: str | None = None
        result: Any = None
        try:
            result = step()
        except Exception as e:
            problem = f"{type(e).__name__}: {e}"
        self.rendezvous.settle(what, problem)
        return result

    def address(self, rank: int) -> int:
        """Where rank's memory begins in this process."""
        return self._base + rank * self.span

    def allocate(self, size: int, tag: str, *, zero: int = 0) -> Block:
        """``size`` bytes at the same offset on every rank. Collective; not for the hot path.

        Args:
            size: bytes, at least 1.
            tag: what it is for; ranks must agree on it.
            zero: the first so many bytes are zero on every rank before any rank returns.

        Raises:
            RankMismatch: the ranks do not ask for the same size and tag.
            PeerTimeout: a rank does not come.
            WeftError: a rank has no memory left; the heap is as before.
        """
        if size < 1:
            raise ValueError(f"size: is {size}, must be at least 1 byte")
        want = -(-size // ALIGNMENT) * ALIGNMENT
        with self.lock:
            while self._falling:
                self._dropped.add(self._falling.popleft())
            # Kernels of this rank may still write to peers' copies of what it dropped.
            dropped = sorted(self._dropped) if self._dropped and self.backend.quiesce() else []
            posts = self.rendezvous.gather("allocate", [{"bytes": size, "tag": tag}, dropped])
            self.rendezvous.check_equal("allocate", [post[0] for post in posts])
            for number in sorted(set.intersection(*(set(post[1]) for post in posts))):
                self._dropped.discard(number)
                self._free.give(*self._blocks.pop(number))
            if (offset := self._free.take(want)) is None:
                self._grow(want - self._free.tail(self.capacity))
                offset = self._free.take(want)
                assert offset is not None
            self._number += 1
            block = Block(self, offset, want, self._number)
            self._blocks[block.number] = (offset, want)
            weakref.finalize(block, self._falling.append, block.number)
            if zero:
                self.backend.zero(self.address(self.rank) + offset, zero)
                self.rendezvous.gather("zeroed", None)
            return block

    def _grow(self, need: int) -> None:
        """Map another chunk behind the last one, on all ranks or on none."""
        unit = self.backend.granularity
        size = max(-(-need // unit) * unit, self.backend.chunk)
        start = self.capacity

        def create() -> tuple[int, Any]:
            if start + size > self.span:
                raise MemoryError(
                    f"the heap's range of {self.span} bytes is used up: {start} in use, {size} more wanted"
                )
            return self.backend.create(size)

        mine: tuple[int, Any] | None = None
        fds: list[int] = []
        mapped: list[int] = []
        try:
            try:
                mine = create()
                problem = None
            except Exception as e:
                problem = f"{type(e).__name__}: {e}"
            self.rendezvous.settle(f"grow the heap by {size} bytes", problem)
            assert mine is not None
            fds = self.rendezvous.exchange_fds(mine[0], self._secret)

            def map_all() -> None:
                for rank, fd in enumerate(fds):
                    handle = mine[1] if rank == self.rank else self.backend.adopt(fd, size)
                    try:
                        address = self.address(rank) + start
                        self.backend.map(address, handle, size)
                        mapped.append(address)
                    finally:
                        if rank != self.rank:
                            self.backend.drop(handle)

            self._settled("map memory", map_all)
        except BaseException:
            for address in mapped:
                self.backend.unmap(address, size)
            raise
        finally:
            if mine is not None:  # mappings keep the memory
                self.backend.drop(mine[1])
                close_fds([*fds, mine[0]] if mine[0] not in fds else fds)
        self._chunks.append((start, size))
        self.capacity += size
        self._free.give(start, size)

    def tensor(
        self, rank: int, offset: int, shape: tuple[int, ...], dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        """Rank's memory from ``offset`` on as a contiguous tensor on this rank's device; it keeps ``owner`` alive."""
        tensor = torch.empty(0, dtype=dtype, device=self.device)
        strides, count = [], 1
        for n in reversed(shape):
            strides.append(count)
            count *= n
        if count == 0:
            return tensor.reshape(shape)
        storage = tensor_over(self.address(rank) + offset, count * dtype.itemsize, self.device, owner)
        return tensor.set_(storage, 0, shape, strides[::-1])


def _unmap_all(
    backend: Backend, base: int, span: int, world_size: int, chunks: list[tuple[int, int]]
) -> None:
    backend.quiesce()
    for start, size in chunks:
        for rank in range(world_size):
            backend.unmap(base + rank * span + start, size)
    backend.release(base, span * world_size)


_heaps: dict[tuple[str, str, int], tuple[ProcessGroup, Heap | HeapUnavailable]] = {}
_lock = threading.RLock()


def heap(group: Group = None, device: torch.device | str | None = None) -> Heap:
    """The heap of ``group`` on ``device`` (default: what its backend is for). The first call is collective.

    Raises:
        HeapUnavailable: the ranks cannot address each other's memory: several hosts, no peer access, a
            process group without processes. Every rank gets the same answer, at once from then on.
    """
    pg = resolve_group(group)
    where = torch.device(device) if device is not None else _default_device(pg)
    index = where.index
    if index is None:
        index = torch.cuda.current_device() if where.type == "cuda" else -1
    key = (pg.group_name, where.type, index)
    known = _heaps.get(key)
    if known is None or known[0] is not pg:  # a name may be used again after destroy_process_group
        with _lock:
            known = _heaps.get(key)
            if known is None or known[0] is not pg:
                _forget_destroyed()
                known = _heaps[key] = (pg, _make(pg, where))
    found = known[1]
    if isinstance(found, HeapUnavailable):
        raise HeapUnavailable(str(found))
    return found


def _forget_destroyed() -> None:
    """Let go of the heaps of groups that are no more; their memory lives on while tensors lie in it."""
    for key, (pg, _) in list(_heaps.items()):
        try:
            alive = resolve_group(key[0]) is pg
        except ValueError:
            alive = False
        if not alive:
            del _heaps[key]


def _make(pg: ProcessGroup, device: torch.device) -> Heap | HeapUnavailable:
    if pg.name() in ("fake", "threaded"):
        return HeapUnavailable(
            f"no heap for group {pg.group_name!r}: its backend {pg.name()!r} has no processes"
        )
    try:
        return Heap(pg, device)
    except HeapUnavailable as e:
        return e


def unavailable(group: Group = None, device: torch.device | str | None = None) -> str | None:
    """Why ``group`` has no heap on ``device``; None if it has one. The first call is collective."""
    try:
        heap(group, device)
    except HeapUnavailable as e:
        return str(e)
    return None


def check() -> None:
    """Raise what a wait of this rank has run into, in any group: for programs that only replay CUDA graphs.

    Otherwise the next call of an op says so. It reads host memory only: for the state up to now, synchronize first.

    Raises:
        PeerTimeout: a wait on a peer has expired in a workspace of an op.
    """
    for _, found in list(_heaps.values()):
        if isinstance(found, Heap):
            for workspace in list(found.workspaces.values()):
                workspace.raise_if_broken()


def heap_of(tensor: torch.Tensor) -> Block | None:
    """The block whose memory a tensor lies in; None if it lies on no heap."""
    owner = getattr(tensor.untyped_storage(), "_weft_owner", None)
    return owner if isinstance(owner, Block) else None


def _default_device(pg: ProcessGroup) -> torch.device:
    """The current CUDA device for a group with NCCL, the CPU for others."""
    return torch.device("cuda" if "nccl" in dist.get_backend_config(pg) else "cpu")
