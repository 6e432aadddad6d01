"""What all-reduces have in common, those of a process group and those after a product too: the choice, and what a
workspace keeps."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ...kernels.all_reduce import OP
from ...kernels.all_reduce.configs import (
    AllReduceConfig,
    all_reduce_layout,
    choose_all_reduce,
    estimate_all_reduce_us,
)
from ...kernels.device.collective.host_exchange import exchange_layout
from ...symm_mem.heap.heap import Heap
from .choice import Choice, on_host, unfused
from .launch_cache import PreparedKernel
from .plan import num_sms, sends_in_turn
from .workspaces import ALL_REDUCE

if TYPE_CHECKING:
    from ...kernels.device.jit.program import Program


class TensorLike(Protocol):
    """What a choice asks of a tensor, which need not be there yet."""

    @property
    def device(self) -> torch.device: ...
    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def nbytes(self) -> int: ...


class NotYet(NamedTuple):
    """Of a tensor that is not there yet."""

    device: torch.device
    dtype: torch.dtype
    nbytes: int


class _How(NamedTuple):
    """``given``: the configuration is not that of the model."""

    config: AllReduceConfig
    given: bool


def choose_sum(x: TensorLike, reduce_op: str, group: ProcessGroup) -> Choice:
    """The choice for a tensor like x, where the ranks can address each other's memory."""
    if x.device.type == "cpu":
        return on_host(exchange_layout(x.nbytes, group.size()))
    return choose_sum_on_cuda(x, reduce_op, group)


def choose_sum_on_cuda(
    x: TensorLike,
    reduce_op: str,
    group: ProcessGroup,
    config: AllReduceConfig | None = None,
    kind: str = ALL_REDUCE,
) -> Choice:
    """The same on CUDA, in workspaces of a kind; by a given configuration if there is one, whatever the size."""
    size, rank, nbytes = group.size(), group.rank(), x.nbytes
    if config is None and nbytes >= nccl_from():
        return unfused(f"WEFT_NCCL_ALL_REDUCE_FROM is {nccl_from()} bytes")
    used = config or choose_all_reduce(nbytes, size, num_sms(x.device))

    def programs() -> list[Program]:
        from ...kernels.all_reduce.cuda_kernel import all_reduce_program

        return [all_reduce_program(size, rank, x.dtype, reduce_op)]

    return Choice(
        "push",
        kind=kind,
        layout=all_reduce_layout(nbytes, size, used),
        predicted_us=estimate_all_reduce_us(nbytes, size, used),
        programs=programs,
        how=_How(used, given=config is not None),
    )


def prepare_all_reduce(
    choice: Choice, where: Heap, x: Tensor, reduce_op: str, name: str = OP
) -> PreparedKernel:
    """What the workspace keeps for such calls. The ranks compile together, by a name: what a wait counts is not what a
    peer still compiles."""
    found: list[PreparedKernel] = []
    # Under one name: one may call in place and another one not.
    key = (name, choice.how.config.form, x.dtype, reduce_op)
    where.prepare(name, key, lambda: found.append(_prepared(choice, where, x, reduce_op)))
    return found[0] if found else _prepared(choice, where, x, reduce_op)


def _prepared(choice: Choice, where: Heap, x: Tensor, reduce_op: str) -> PreparedKernel:
    from ...kernels.all_reduce.cuda_kernel import AllReduceLauncher

    workspace, how = choice.workspace_on(where), choice.how
    key: Any = (x.numel(), x.dtype, reduce_op, *((how.config,) if how.given else ()))
    found: PreparedKernel | None = workspace.prepared.get(key)
    if found is None:
        config = replace(how.config, in_turn=sends_in_turn(where))
        kernel = AllReduceLauncher(workspace, x.numel(), x.dtype, reduce_op, x.device, config)
        found = PreparedKernel(workspace, kernel, choice.plan_in(workspace))
        workspace.keep(key, found)
    return found


@cache
def nccl_from() -> float:
    """Bytes from which on the group's own collective is asked for.

    Raises:
        ValueError: WEFT_NCCL_ALL_REDUCE_FROM is not a number of bytes.
    """
    text = os.environ.get("WEFT_NCCL_ALL_REDUCE_FROM")
    if text is None:
        return float("inf")
    if not text.isdigit():
        raise ValueError(f"WEFT_NCCL_ALL_REDUCE_FROM: is {text!r}, must be a number of bytes")
    return int(text)
