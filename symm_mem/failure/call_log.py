"""Which call an error is about. On CUDA it is raised long after the call, which the epoch identifies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol, TypeAlias, TypeVar

from ..call_site import Site, calling, text
from ..errors import WeftError

_KEPT = 4096  # calls: more than a GPU's queue holds

T = TypeVar("T")
Grids: TypeAlias = tuple[int, ...]


class TimedName(str):
    """The name of a call that has a deadline of its own, in ``seconds``."""

    seconds: float

    def __new__(cls, name: str, seconds: float) -> TimedName:
        named = super().__new__(cls, name)
        named.seconds = seconds
        return named

    def __reduce__(self) -> tuple[Any, ...]:
        return str, (str(self),)


class CallLog:
    """The calls on one workspace, by buffer and epoch; of LL exchanges, by block and epoch.

    Args:
        timeout: the deadline that a call begins with.
        replayed: the calls are those of a captured graph, whose replays repeat them.
    """

    def __init__(self, buffers: int, timeout: Callable[[], float], replayed: bool) -> None:
        self.op = "a call"
        self._timeout = timeout
        self._captured_timeout = 0.0
        self.last_site: Site | None = None
        self.replayed = replayed
        self._kept: list[deque[tuple[str, Site | None]]] = [deque(maxlen=_KEPT) for _ in range(buffers)]
        self._epochs = [0] * buffers
        self._pushed: deque[tuple[str, Site | None, Grids]] = deque(maxlen=_KEPT)
        self._launched: dict[Grids, int] = {}  # how often, all in all

    @property
    def site(self) -> str | None:
        """Where the last call came from."""
        return text(self.last_site)

    def begins(self, op: str, site: Site | None, grids: Grids = ()) -> None:
        """A call. ``grids``: blocks of each of its LL exchanges. A launch is an epoch of every block that it has."""
        self.op, self.last_site = op, site
        if grids:
            self._pushed.append((op, site, grids))
            self._launched[grids] = self._launched.get(grids, 0) + 1
        if self.replayed:
            self._captured_timeout = self._timeout()

    @property
    def seconds(self) -> float:
        """The deadline; of a captured graph the one that it was captured with."""
        return self._captured_timeout or self._timeout()

    def takes(self, buffer: int) -> None:
        """The call that began last takes a buffer."""
        self._epochs[buffer] += 1
        self._kept[buffer].append((self.op, self.last_site))

    def find(self, buffer: int | None, epoch: int) -> tuple[str, str | None]:
        """Op and site of epoch ``epoch`` of a buffer, the first one being 1; of the last call if that is not known."""
        if buffer is not None and (epochs := self._epochs[buffer]):
            back = self._back(epoch, epochs)
            kept = self._kept[buffer]
            if 1 <= back <= len(kept):
                op, site = kept[-back]
                return op, text(site)
        return self.op, self.site

    def find_push(self, block: int, epoch: int) -> tuple[str, str | None]:
        """The same of an epoch of a block's slots."""
        if epochs := sum(times * _epochs_of(grids, block) for grids, times in self._launched.items()):
            back = self._back(epoch, epochs)
            for op, site, grids in reversed(list(self._pushed)) if back >= 1 else ():
                back -= _epochs_of(grids, block)
                if back <= 0:
                    return op, text(site)
        return self.op, self.site

    def _back(self, epoch: int, epochs: int) -> int:
        """How many epochs ago epoch ``epoch`` was, of ``epochs``; 1: it is the newest."""
        return epochs - ((epoch - 1) % epochs if self.replayed else epoch - 1)

    def reset_state(self) -> None:
        """Epochs count from 0 again. A captured graph keeps its calls."""
        if not self.replayed:
            self._epochs = [0] * len(self._epochs)
            for kept in self._kept:
                kept.clear()
            self._pushed.clear()
            self._launched.clear()


def _epochs_of(grids: Grids, block: int) -> int:
    return sum(block < grid for grid in grids)


class _Taken(Protocol):
    """A ``Workspace``."""

    def abandon(self, cause: BaseException) -> None: ...


class _Running(threading.local):
    inside = False  #: this thread is making a call of an op
    workspace: _Taken | None = None  #: what that call has taken


running = _Running()


def poison_on_error(call: Callable[..., T]) -> Callable[..., T]:
    """A call of an op that an exception ends after it has taken its workspace leaves the group broken on this rank."""

    @wraps(call)
    def guarded(*args: Any, **named: Any) -> T:
        running.inside = True
        try:
            return call(*args, **named)
        except BaseException as e:
            # weft's own errors come from before the launch, or from a wait that has broken the group itself.
            if running.workspace is not None and not isinstance(e, WeftError):
                running.workspace.abandon(e)
            raise
        finally:
            running.inside, running.workspace, calling.op = False, None, None

    return guarded
