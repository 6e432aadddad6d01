"""How a call would run, asked without making it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from ..kernels.device.jit.ahead import CompilableProgram
from ..symm_mem import resolve_group
from ..symm_mem.backends.cuda_state import noting_programs
from ..symm_mem.heap.registry import default_device
from .dispatch.plan import Plan
from .dispatch.planning import Planned, planning


def plan(op: Callable[..., Any], *args: Any, **kwargs: Any) -> Plan:
    """The plan of ``op(*args, **kwargs)``, which is not called: nothing is computed, launched, sent or allocated.

    >>> import torch
    >>> from weft.fused_ops import fused_all_gather_matmul, plan
    >>> x, w = torch.empty(128, 64, device="meta"), torch.empty(64, 96, device="meta")
    >>> found = plan(fused_all_gather_matmul, x, [w], 0, None, return_A=False)
    >>> found.algorithm, found.workspace_bytes > 0
    ('host', True)

    What ``last_plan()`` is behind the call, but for what only a call finds out: whether the ranks can address each
    other's memory, if no call of the group has found it yet; that an operand begins at an address for which it is
    copied; and what the tuner has measured. Each rank may ask by itself. Where there is no GPU, one that is asked about
    is taken to be an H200. A group of torch's "fake" backend stands for one of as many ranks.

    Args:
        op: a function of ``weft.fused_ops`` that communicates, or an op of ``torch.ops.weft``.
        *args: its arguments. Tensors may be fake, real, or on the meta device: these are taken to be where others are,
            or where the default group's ranks have theirs: on CUDA with NCCL.
        **kwargs: likewise, those that have names.

    Returns:
        the algorithm, bytes of the workspace, microseconds that the kernels' model predicts; or why it runs unfused.

    Raises:
        ValueError, TypeError: what the call would raise; or ``op`` is no such function.
    """
    return _planned(op, args, kwargs, makes=False)


def plan_and_programs(
    op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Plan, list[CompilableProgram]]:
    """As ``plan``, and the programs that the call would launch, for ``Compilation``. None is loaded.

    Raises:
        ValueError, TypeError: as ``plan``.
    """
    with noting_programs() as programs:
        return _planned(op, args, kwargs, makes=True), programs


def _planned(op: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, makes: bool) -> Plan:
    if not callable(op):
        raise TypeError(f"op: is of type {type(op).__name__}, must be a function of weft.fused_ops")
    fakes = (x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor))
    mode = next((x.fake_mode for x in fakes), None) or FakeTensorMode()
    device = _device_of_meta(args, kwargs)

    def fake(x: Tensor) -> Tensor:
        if isinstance(x, FakeTensor):
            return x
        if x.device.type != "meta":
            return mode.from_tensor(x)
        with mode:
            return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)

    with torch.no_grad():
        given, named = tree_map_only(Tensor, fake, (args, kwargs))
        try:
            with mode, planning(makes=makes):
                op(*given, **named)
        except Planned as planned:
            found: Plan = planned.plan
            return found
    raise TypeError(f"op: {getattr(op, '__name__', op)} has no plan, must be an op of weft that communicates")


def _device_of_meta(args: Any, kwargs: Any) -> torch.device:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    there = next((x.device for x in tensors if x.device.type != "meta"), None)
    if there is not None:
        return there
    found = default_device(resolve_group(None))
    return torch.device("cuda", 0) if found.type == "cuda" and found.index is None else found
