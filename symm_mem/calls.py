"""Which call an error is about. On CUDA it is raised long after the call, which the count of a use identifies."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

from .errors import WeftError
from .sites import Site, text

if TYPE_CHECKING:
    from .workspace import Workspace

_KEPT = 4096  # calls: more than a GPU's queue holds

T = TypeVar("T")


class Calls:
    """What was called on one workspace, by half and count of use.

    Args:
        timeout: the deadline that a call begins with.
        replayed: the calls are those of a captured graph, whose replays use the halves in the same way again.
    """

    def __init__(self, halves: int, timeout: Callable[[], float], replayed: bool) -> None:
        self.op = "a call"
        self._timeout = timeout
        self._captured_timeout = 0.0
        self._site: Site | None = None
        self.replayed = replayed
        self._kept: list[deque[tuple[str, Site | None]]] = [deque(maxlen=_KEPT) for _ in range(halves)]
        self._uses = [0] * halves

    @property
    def site(self) -> str | None:
        """Where the last call came from."""
        return text(self._site)

    def begins(self, op: str, site: Site | None) -> None:
        self.op, self._site = op, site
        if self.replayed:
            self._captured_timeout = self._timeout()

    @property
    def seconds(self) -> float:
        """The deadline; of a captured graph the one that it was captured with."""
        return self._captured_timeout or self._timeout()

    def takes(self, half: int) -> None:
        """The call that began last takes a half."""
        self._uses[half] += 1
        self._kept[half].append((self.op, self._site))

    def find(self, half: int | None, use: int) -> tuple[str, str | None]:
        """Op and site of the ``use``-th use of a half, the first one being 1; of the last call if that is not known.

        It is not where the kernels count by block and not by half, as those of the all-reduce do.
        """
        if half is not None and (uses := self._uses[half]):
            at = (use - 1) % uses if self.replayed else use - 1
            back = uses - at  # 1: the newest
            kept = self._kept[half]
            if 1 <= back <= len(kept):
                op, site = kept[-back]
                return op, text(site)
        return self.op, self.site

    def forget(self) -> None:
        """Uses count from 0 again. A captured graph keeps its calls."""
        if not self.replayed:
            self._uses = [0] * len(self._uses)
            for kept in self._kept:
                kept.clear()


class _Running(threading.local):
    inside = False  #: this thread is making a call of an op
    workspace: Workspace[Any] | None = None  #: what that call has taken


running = _Running()


def whole(call: Callable[..., T]) -> Callable[..., T]:
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
            running.inside, running.workspace = False, None

    return guarded
