"""How a public function is called: eager, or by what writes a graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.autograd import profiler
from torch.distributed import ProcessGroup
from torch.utils._device import DeviceContext

from ...symm_mem import Group, forks, group_name, resolve_group

_is_compiling, _is_dynamo_compiling = torch.compiler.is_compiling, torch.compiler.is_dynamo_compiling
_function_modes = torch._C._len_torch_function_stack
_function_mode = torch._C._get_function_stack_at
_F = TypeVar("_F", bound=Callable[..., object])


def known_name(group: Group) -> str | None:
    """The group's name, if a call may go round ``torch.ops``; None where Dynamo, a function mode or a profiler wants to
    see it, and for what is no group."""
    if _is_dynamo_compiling() or profiler._is_profiler_enabled:
        return None
    modes = _function_modes()
    # That of torch.set_default_device, which lies below all others, has nothing to do with these ops.
    if modes > 1 or (modes == 1 and not isinstance(_function_mode(0), DeviceContext)):
        return None
    if type(group) is str:
        return group
    if isinstance(group, ProcessGroup):
        return group.group_name
    try:
        return group_name(group)
    except (TypeError, ValueError):  # in its turn, after the arguments before it
        return None


def constant_in_graphs(fn: _F) -> _F:
    """As ``torch.compiler.assume_constant_result``, without the import of Dynamo, which takes seconds."""
    fn._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return fn


@constant_in_graphs
def world_size_of(name: str) -> int | None:
    """The group's number of ranks; None of what is no group."""
    try:
        return resolve_group(name).size()
    except ValueError:  # the op refuses it
        return None


def of_graph(name: str) -> dict[str, int | None]:
    """What only a graph says: how many ranks it is made for, as the parts that it is given are, and a mean. It is part
    of what Inductor's caches on disk know a graph by: they gave a run that of another number of ranks."""
    return {"group_size": world_size_of(name)} if _is_compiling() else {}


@constant_in_graphs
def _rank_in(name: str) -> int | None:
    try:
        return resolve_group(name).rank()
    except ValueError:  # the op refuses it
        return None


@constant_in_graphs
def refuse_child_of(name: str, op: str) -> None:
    """Before what ``op`` does by itself on a GPU, as a copy: ``forks.refuse_child``, of what may be no group."""
    if forks.inherited and _rank_in(name) is not None:
        forks.refuse_child(resolve_group(name), op)


def of_rank_in_graph(name: str) -> dict[str, int | None]:
    """As ``of_graph``, of a call whose sizes differ by rank: ranks share those caches."""
    return {"group_rank": _rank_in(name)} if _is_compiling() else {}
