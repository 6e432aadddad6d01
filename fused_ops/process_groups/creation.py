"""Process groups ``"weft"`` as torch asks for them."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping
from datetime import timedelta
from functools import cache
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup, distributed_c10d

from ...symm_mem import Group, resolve_group
from ...symm_mem.switches import is_on
from .group import BACKEND_TYPES, WeftProcessGroup
from .in_torch import see_groups
from .options import set_group_timeout
from .taken import GroupCalls

NAME = "weft"
_HELPER = "_new_process_group_helper"


@torch._disable_dynamo
def process_group(group: Group = None) -> GroupCalls:
    """What weft adds to the group: who took its calls, and why (``calls``).

    >>> import torch.distributed as dist
    >>> import weft
    >>> group = dist.new_group(backend="weft")
    >>> weft.process_group(group).calls()
    ()

    Its heap is that of all of weft's ops: ``symm_mem.empty(..., group=group)`` and ``symm_mem.stats(group)``.

    Args:
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.

    Raises:
        TypeError: it is of other backends (``is_weft_group`` tells), or no group.
        ValueError: there is no such group.
    """
    found = resolve_group(group)
    if not isinstance(found, WeftProcessGroup):
        raise TypeError(f"group: its backend is {found.name()!r}, must be 'weft'")
    return found.record


@torch._disable_dynamo
def is_weft_group(group: Group = None) -> bool:
    """Whether weft takes calls of the group: its backend is "weft", or that of one type of device.

    >>> import torch.distributed as dist
    >>> import weft
    >>> is_weft_group = weft.fused_ops.is_weft_group
    >>> is_weft_group(dist.new_group(backend="weft")), is_weft_group(dist.new_group(backend="gloo"))
    (True, False)

    Args:
        group: as for ``process_group``.

    Raises:
        TypeError, ValueError: it is no group, or there is none such.
    """
    return isinstance(resolve_group(group), WeftProcessGroup)


def _asked(frame: FrameType | None) -> tuple[dict[str, str], torch.device | None, dict[str, Any]]:
    """What torch was asked for: the names of backends by type of device, and the device that the group is bound to. And
    what it has made already, backends of other names. It hands half of that on to the maker of a backend; the rest
    stands in its frame."""
    backends = {"cpu": NAME, "cuda": NAME}
    while frame is not None and frame.f_code.co_name != _HELPER:
        frame = frame.f_back
    if frame is None:
        return backends, None, {}
    config, before = frame.f_locals.get("backend_config"), frame.f_locals.get("pg")
    made = {}
    if isinstance(config, distributed_c10d.BackendConfig):
        backends = {kind: str(name) for kind, name in config.get_device_backend_map().items()}
    if isinstance(before, ProcessGroup):
        made = {kind.type: before._get_backend(kind) for kind in before._device_types}
    return backends, frame.f_locals.get("device_id"), made


def create_process_group(options: Any, backend_options: Any) -> WeftProcessGroup:
    """What torch calls for each group (``Backend.register_backend("weft", ..., extended_api=True)``).

    Raises:
        ValueError: the group would have another backend than weft that is neither gloo nor NCCL.
        TypeError: ``backend_options`` are not those of the group's backends.
        RuntimeError: there is no device for it.
    """
    backends, bound, there = _asked(sys._getframe(1))
    see_groups()
    names = _inner_names(backends)
    _check_options(backend_options, names.values())
    store = PrefixStore("weft/", options.store)
    inner = ProcessGroup(store, options.group_rank, options.group_size)
    if bound is not None:
        inner.bound_device_id = bound
    for kind, name in names.items():
        backend = there.get(kind)
        if backend is None:
            where = PrefixStore(f"{kind}/", store)
            make = _nccl if name == "nccl" else _gloo
            made = make(where, options, backend_options)
            made._set_sequence_number_for_group()
            backend = _watched(made, where, options)
        inner._register_backend(torch.device(kind), BACKEND_TYPES[name], backend)
    inner._set_default_backend(BACKEND_TYPES["nccl" if "nccl" in names.values() else "gloo"])
    inner._set_group_name(options.group_id)
    if "WEFT_TIMEOUT" not in os.environ:
        set_group_timeout(options.timeout, options.group_id)
    return WeftProcessGroup(inner, tuple(kind for kind in names if backends[kind] == NAME))


def _check_options(given: Any, names: Collection[str]) -> None:
    """``pg_options`` are NCCL's, where the group has it, else gloo's."""
    if given is None:
        return
    if "nccl" in names:
        if not isinstance(given, dist.ProcessGroupNCCL.Options):
            raise TypeError(
                f"pg_options: is {type(given).__name__}, must be ProcessGroupNCCL.Options for NCCL"
            )
    elif not isinstance(given, distributed_c10d.ProcessGroupGloo._Options):  # type: ignore[attr-defined]
        raise TypeError(
            f"pg_options: is {type(given).__name__}, must be ProcessGroupGloo._Options between CPU ranks"
        )


def _inner_names(backends: Mapping[str, str]) -> dict[str, str]:
    """The backend of each type of device, without weft."""
    names = {}
    for kind, name in backends.items():
        if name == NAME and kind == "cuda":
            if is_on("WEFT_SHARE_GPUS"):
                names[kind] = "gloo"  # NCCL takes no two ranks on one GPU
            elif torch.cuda.is_available() and dist.is_nccl_available():
                names[kind] = "nccl"
        elif name == NAME and kind == "cpu":
            names[kind] = "gloo"
        elif name in BACKEND_TYPES:
            names[kind] = name
        else:
            raise ValueError(f"backend: is {kind}:{name} with weft, must be gloo or nccl, on cpu or cuda")
    if not names:
        raise RuntimeError("backend: is weft for CUDA alone, and this process has no GPU, or torch no NCCL")
    return names


@cache
def _told_of_timeouts(kind: type) -> Any:
    """A backend that hands a timeout on to weft: torch's ``_set_pg_timeout`` tells backends, and not their group."""

    class ToldOfTimeouts(kind):  # type: ignore[misc]
        group_name = ""

        def set_timeout(self, timeout: timedelta) -> None:
            super().set_timeout(timeout)
            set_group_timeout(timeout, self.group_name)

        def _set_default_timeout(self, timeout: timedelta) -> None:
            super()._set_default_timeout(timeout)
            set_group_timeout(timeout, self.group_name)

    return ToldOfTimeouts


def _gloo(store: Any, options: Any, backend_options: Any) -> Any:
    kind: Any = distributed_c10d.ProcessGroupGloo
    make, place = _told_of_timeouts(kind), (store, options.group_rank, options.group_size)
    if isinstance(backend_options, kind._Options):
        backend_options._timeout = options.timeout
        made = make(*place, backend_options)
    else:
        made = make(*place, timeout=options.timeout)
    made.group_name = options.group_id
    made.options.global_ranks_in_group = options.global_ranks_in_group
    made.options.group_name = options.group_id
    return made


def _nccl(store: Any, options: Any, backend_options: Any) -> Any:
    """As torch makes it: of the same options, and split from the default group's where that is bound to a device."""
    if backend_options is None:
        backend_options = dist.ProcessGroupNCCL.Options()
        backend_options.is_high_priority_stream = False
    backend_options._timeout = options.timeout
    if dist.is_initialized() and dist.group.WORLD is not None and dist.group.WORLD.bound_device_id:
        split_from = distributed_c10d._get_split_source(dist.group.WORLD)
        if split_from:
            backend_options.split_from = split_from
            backend_options.split_color = distributed_c10d._process_group_color(options.global_ranks_in_group)
    backend_options.global_ranks_in_group = options.global_ranks_in_group
    backend_options.group_name = options.group_id
    made = _told_of_timeouts(dist.ProcessGroupNCCL)(
        store, options.group_rank, options.group_size, backend_options
    )
    made.group_name = options.group_id
    return made


def _watched(backend: Any, store: Any, options: Any) -> Any:
    """With TORCH_DISTRIBUTED_DEBUG=DETAIL the backend in torch's checks, else the backend."""
    if dist.get_debug_level() != dist.DebugLevel.DETAIL or not dist.is_gloo_available():
        return backend
    return distributed_c10d._create_process_group_wrapper(
        wrapped_pg=backend,
        store_prefix=options.group_id,
        store=store,
        rank=options.group_rank,
        world_size=options.group_size,
        timeout=options.timeout,
    )
