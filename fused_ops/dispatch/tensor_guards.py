"""Tensor guards: whether tensors are like those of an earlier call, by one check for all of them, torch.compile's.

Types, sizes, strides, dtypes and devices are compared, and the dispatch keys that tensors and the thread have together:
these differ in transforms and traces, and for negated, sparse or functional tensors. One by one (launch_cache.py),
these checks take as long as all else before a launch. Tangents, streams and what guards overlook of a thread's state
are checked besides (``likely_call``); addresses are left to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from ...symm_mem import forks, is_checked
from ...symm_mem.backends import cuda_state
from .stream_order import stream_on

_PYTHON_DISPATCHER = torch._C.DispatchKey.PythonDispatcher
_dispatch_modes = torch._C._len_torch_dispatch_stack
_key_is_on = torch._C._dispatch_tls_is_dispatch_key_included
TYPES = frozenset((Tensor, Parameter))  # which are no subclasses to the ops
_MOST_LIKELY = 4  # cached calls of a kind that are tried
#: Whether so many tensors, or other objects, pass.
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


# Other states may lead to the same keys and mean something else, such as below a trace.
_COMMON = _common_states()


def guards_of(tensors: Sequence[Tensor]) -> TensorGuard:
    """The guard of ``tensors``, as they and the thread are now. It keeps no tensor, and takes as many at each check.

    Nothing passes where a gradient of one is wanted, one is there twice, or the thread is in a rare state.
    """
    if _state() not in _COMMON:
        return matches_none
    wanted = any(t.requires_grad for t in tensors)
    if wanted and torch.is_grad_enabled():
        return matches_none
    if len({*map(id, tensors)}) < len(tensors):  # torch's take each tensor once
        return matches_none
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(t.shape) for t in tensors]
        strides: Any = [list(t.stride()) for t in tensors]
        check: TensorGuard = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
    except Exception:  # another version of torch: each tensor is checked by itself
        return matches_none
    return _without_gradient(check) if wanted else check


def _without_gradient(check: TensorGuard) -> TensorGuard:
    """Of tensors that require a gradient: torch's guards do not look at the grad mode."""

    def alike(*given: object) -> bool:
        return not torch.is_grad_enabled() and check(*given)

    return alike


def matches_none(*tensors: object) -> bool:
    return False


def has_tangents() -> bool:
    """Whether tensors may be dual ones, of forward-mode differentiation. Neither type nor flag shows it."""
    return forward_ad._current_level >= 0


def _bits(*names: str) -> int:
    bits = 0
    for name in names:
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, name)).raw_repr()
    return bits


# All other dispatch keys of a tensor, or of the thread, must see a call before its kernel. Those of autocast fall
# through: the ops have no rule for it.
_OF_TENSORS = _bits(
    "CPU", "CUDA", "AutogradCPU", "AutogradCUDA", "ADInplaceOrView", "AutocastCPU", "AutocastCUDA"
)
_OF_THREADS = _bits("BackendSelect", "ADInplaceOrView")


def has_plain_state() -> bool:
    """Whether the thread is in no mode, transform or trace that must see a call before its kernel."""
    return not torch._C._dispatch_tls_local_include_set().raw_repr() & ~_OF_THREADS and not has_tangents()


def _wants_gradient(tensors: Sequence[Any]) -> bool | None:
    """Whether a gradient is wanted of a call with these, which may be anything.

    None if something else has to run between it and the kernels: a mode, transform or tracing, a subclass, what is done
    before memory is what a tensor says.
    """
    if not has_plain_state():
        return None
    wanted = False
    for t in tensors:
        if type(t) not in TYPES or torch._C._dispatch_keys(t).raw_repr() & ~_OF_TENSORS:
            return None
        wanted = wanted or t.requires_grad
    return wanted and torch.is_grad_enabled()


def needs_no_dispatch(*tensors: Any) -> bool:
    """Whether nothing has to run between a call with these, which may be anything, and the kernels."""
    return _wants_gradient(tensors) is False


def may_look_at(*tensors: Tensor) -> bool:
    """Whether the checked mode, which may wait for data, looks at what these hold before a call. On a GPU a forked
    child cannot, and its call is refused."""
    if torch.compiler.is_compiling() or not is_checked() or (forks.inherited and tensors[0].is_cuda):
        return False
    return needs_no_dispatch(*tensors)


def needs_autograd_alone(*tensors: Any) -> bool:
    """Whether nothing but autograd has to: autocast, for one, is off, and so is the inference mode."""
    if torch.is_inference_mode_enabled():
        return False
    return _state() in _COMMON and _wants_gradient(tensors) is True


def likely_call(kept: dict[Hashable, Any], kind: Hashable, tensors: Sequence[Any]) -> Any:
    """One of the last cached calls of a ``kind``, all with as many tensors, if its guard passes and the stream is the
    same; else None. ``kept``: ``cached_calls`` of call_cache.py."""
    cached = kept.get(kind)
    if cached is None:
        return None
    for t in tensors:
        if type(t) not in TYPES or t.is_nested:  # guards end the process for tensors without sizes
            return None
    cuda = cuda_state.state
    for found in cached:
        if not found.alike(*tensors):
            continue
        # As ``stream_on``, whose call takes as long as it does. A child that was forked has no cached calls.
        device = found.device
        if device < 0:
            stream = stream_on(device)
        elif cuda.current_device() != device or cuda.is_capturing():
            continue
        else:
            stream = cuda.current_stream(device)
        if stream == found.stream:
            # Guards overlook modes that trace, and Python's dispatcher.
            if _dispatch_modes() or _key_is_on(_PYTHON_DISPATCHER) or forward_ad._current_level >= 0:
                return None
            return found
    return None


def note_likely(kept: dict[Hashable, Any], kind: Hashable, found: Any) -> None:
    """The next call of this kind may be one of ``found``, a ``CachedCall``: it is tried first."""
    others = [one for one in kept.get(kind, ()) if one is not found]
    kept[kind] = [found, *others[: _MOST_LIKELY - 1]]
