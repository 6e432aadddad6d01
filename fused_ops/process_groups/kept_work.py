"""Work objects that torch's C++ code may hold longer than Python does.

C++ code calls the Python methods of a work only while its Python object lives, and holds none itself: a functional
collective's work waits in C++ for ``wait_tensor``, DDP's ``join`` hands one over. So the object is kept here until
somebody has waited for it or taken its future.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from ...symm_mem.backends import cuda_state
from .work import DoneWork

_kept: OrderedDict[int, KeptWork] = OrderedDict()
#: Ended works for which nobody has waited and of which Python holds none: C++ code may still wait for them.
_MOST_ENDED = 4096
_ALONE = 2  # references to an object that only a local variable holds, while they are counted


class KeptWork(Work):
    """The work of a call that does not wait."""

    def __init__(self, inner: DoneWork) -> None:
        super().__init__()
        self._inner = inner
        #: Its event belongs to a graph then, and cannot be queried.
        self.is_captured = torch.cuda.is_initialized() and cuda_state.state.is_capturing()

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = self._inner.wait(timeout)
        _kept.pop(id(self), None)
        return done

    def get_future(self) -> torch.futures.Future[Any]:
        future = self._inner.get_future()
        _kept.pop(id(self), None)
        return future

    def is_completed(self) -> bool:
        return self._inner.is_completed()

    def is_success(self) -> bool:
        return self._inner.is_success()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def synchronize(self) -> None:
        self.wait()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Tensor]:
        return self._inner.result()

    def _let_go(self) -> None:
        """Of the tensors: the call has ended, and nobody can ask for them."""
        if self._inner.exception() is None:
            self._inner = DoneWork([])


def kept_work(inner: DoneWork) -> KeptWork:
    work = KeptWork(inner)
    # The oldest ones, each call two, so none is kept for long in vain. A captured stream refuses queries.
    for _ in range(0 if work.is_captured else min(2, len(_kept))):
        try:
            key, oldest = _kept.popitem(last=False)
        except KeyError:  # another thread has waited for the last one
            break
        if sys.getrefcount(oldest) == _ALONE and (oldest.is_captured or oldest.is_completed()):
            oldest._let_go()
            if len(_kept) >= _MOST_ENDED:
                continue
        _kept[key] = oldest
    _kept[id(work)] = work
    return work
