"""Whether tensors are like those of a call before: one question for all of them, that of torch.compile's guards.

Types, sizes, strides, dtypes and devices are compared, and the dispatch keys that tensors and the thread have together:
in transforms and traces these differ, and of negated, sparse or functional tensors. Asked one by one (fast_path.py),
all that takes as long as what else stands in front of a launch. Tangents, streams and what guards overlook of a
thread's state are asked for besides (``likely``); addresses are left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from .stream_order import stream_on

_PYTHON_DISPATCHER = torch._C.DispatchKey.PythonDispatcher
_dispatch_modes = torch._C._len_torch_dispatch_stack
_key_is_on = torch._C._dispatch_tls_is_dispatch_key_included
TYPES = frozenset((Tensor, Parameter))  # of what is no subclass to the ops
_MOST_LIKELY = 4  # findings of a kind that are tried
#: Whether so many tensors, or whatever else stands there, are alike.
TensorGuard: TypeAlias = Callable[..., bool]


def _state() -> tuple[int, int]:
    """The dispatch keys that this thread adds to all tensors', and those that it takes away."""
    added, taken = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    return added.raw_repr(), taken.raw_repr()


def _common_states() -> set[tuple[int, int]]:
    states = set()
    for mode in (False, True):
        with torch.inference_mode(mode):
            states.add(_state())
    return states


# Other states may lead to the same keys as these do, and mean something else: below a trace, say.
_COMMON = _common_states()


def guards_of(tensors: Sequence[Tensor]) -> TensorGuard:
    """What says so of ``tensors``, as they and the thread are now. It keeps no tensor. Each call takes as many.

    None are alike where one may want a gradient, which is a matter of the grad mode, too, or the thread is in a rare
    state.
    """
    if _state() not in _COMMON or any(t.requires_grad for t in tensors):
        return _none
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
    except Exception:  # another version's: then each tensor is looked at
        return _none


def _none(*tensors: object) -> bool:
    return False


def has_tangents() -> bool:
    """Whether tensors may be dual ones, of forward-mode differentiation. Neither type nor flag tells them apart."""
    return forward_ad._current_level >= 0


class Likely(Protocol):
    """A finding that need not be looked up: its call's tensors, device and stream."""

    @property
    def alike(self) -> TensorGuard: ...
    @property
    def device(self) -> int: ...
    @property
    def stream(self) -> int: ...


def likely_call(kept: dict[Hashable, Any], kind: Hashable, tensors: Sequence[Any]) -> Any:
    """One of the last findings of a ``kind`` of calls, all with as many tensors, if these are alike and the stream is
    the same; else None. ``kept``: that of call_cache.py."""
    findings = kept.get(kind)
    if findings is None:
        return None
    for t in tensors:
        if type(t) not in TYPES or t.is_nested:  # guards end the process where sizes cannot be told
            return None
    for found in findings:
        if found.alike(*tensors) and stream_on(found.device) == found.stream:
            # Guards overlook modes that trace, and Python's dispatcher.
            if _dispatch_modes() or _key_is_on(_PYTHON_DISPATCHER) or has_tangents():
                return None
            return found
    return None


def note_likely(kept: dict[Hashable, Any], kind: Hashable, found: Likely) -> None:
    """The next call of this kind may be one of ``found``: it is tried first."""
    if found.alike is _none:
        return
    others = [one for one in kept.get(kind, ()) if one is not found]
    kept[kind] = [found, *others[: _MOST_LIKELY - 1]]
