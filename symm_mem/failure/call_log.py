"""Which call an error is about. On CUDA it is raised long after the call, which the epoch identifies."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
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
    """The calls on one workspace, by what counts its epochs there: a buffer, or of LL exchanges a block.

    Args:
        timeout: the deadline that a call begins with.
        replayed: the calls are those of a captured graph, whose replays repeat them.
        shared: they are those of several, replayed in any order.
    """

    def __init__(self, timeout: Callable[[], float], replayed: bool, shared: bool = False) -> None:
        self.op = "a call"
        self._timeout = timeout
        self._captured_timeout = 0.0
        self.last_site: Site | None = None
        self.replayed, self._shared = replayed, shared
        self._kept: deque[tuple[str, Site | None, int | Grids]] = deque(maxlen=_KEPT)
        self._times: defaultdict[int | Grids, int] = defaultdict(int)  # how often, all in all

    @property
    def site(self) -> str | None:
        """Where the last call came from."""
        return text(self.last_site)

    def begins(self, op: str, site: Site | None, grids: Grids = ()) -> None:
        """A call. ``grids``: blocks of each of its LL exchanges. A launch is an epoch of every block that it has."""
        self.op, self.last_site = op, site
        if grids:
            self.takes(grids)
        if self.replayed:
            self._captured_timeout = self._timeout()

    @property
    def seconds(self) -> float:
        """The deadline; of a captured graph the one that it was captured with."""
        return self._captured_timeout or self._timeout()

    def takes(self, what: int | Grids) -> None:
        """The call that began last takes a buffer, or so many blocks with each of its launches."""
        self._times[what] += 1
        self._kept.append((self.op, self.last_site, what))

    def find(self, counter: int | None, epoch: int) -> tuple[str, str | None]:
        """Op and site of epoch ``epoch`` of a buffer or block, the first one being 1; of the last call if that is not
        known."""
        if self._shared:
            return " or ".join(sorted({op for op, *_ in list(self._kept)})) or self.op, None
        if counter is not None and (
            epochs := sum(times * _epochs_of(what, counter) for what, times in self._times.items())
        ):
            # How many epochs ago; 1: it is the newest.
            back = epochs - ((epoch - 1) % epochs if self.replayed else epoch - 1)
            for op, site, what in reversed(list(self._kept)) if back >= 1 else ():
                back -= _epochs_of(what, counter)
                if back <= 0:
                    return op, text(site)
        return self.op, self.site

    def reset_state(self) -> None:
        """Epochs count from 0 again. A captured graph keeps its calls."""
        if not self.replayed:
            self._kept.clear()
            self._times.clear()


def _epochs_of(what: int | Grids, counter: int) -> int:
    """Of a buffer or block, in a call that takes ``what``."""
    return int(what == counter) if isinstance(what, int) else sum(counter < grid for grid in what)


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
