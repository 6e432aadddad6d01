"""What all-reduces have in common, those of a process group and those after a product too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

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
from .choice import Choice, on_host, prepare_kernel
from .launch_cache import PreparedKernel
from .plan import num_sms, sends_in_turn
from .workspaces import ALL_REDUCE

if TYPE_CHECKING:
    from ...kernels.device.jit.program import Program


class NotYet(NamedTuple):
    """What a choice asks of a tensor, of one that is not there yet."""

    device: torch.device
    dtype: torch.dtype
    nbytes: int


def choose_sum(x: Tensor | NotYet, reduce_op: str, group: ProcessGroup) -> Choice:
    """The choice for a tensor like x, where the ranks can address each other's memory."""
    if x.device.type == "cpu":
        return on_host(exchange_layout(x.nbytes, group.size()))
    return choose_sum_on_cuda(x, reduce_op, group)


def choose_sum_on_cuda(
    x: Tensor | NotYet, reduce_op: str, group: ProcessGroup, kind: str = ALL_REDUCE
) -> Choice:
    """The same on CUDA, in workspaces of a kind."""
    size, rank, nbytes = group.size(), group.rank(), x.nbytes
    config = choose_all_reduce(nbytes, size, num_sms(x.device))

    def programs() -> list[Program]:
        from ...kernels.all_reduce.cuda_kernel import all_reduce_program

        return [all_reduce_program(size, rank, x.dtype, reduce_op)]

    return Choice(
        "push",
        kind=kind,
        layout=all_reduce_layout(nbytes, size, config),
        predicted_us=estimate_all_reduce_us(nbytes, size, config),
        programs=programs,
        how=config,
    )


def prepare_all_reduce(
    choice: Choice, where: Heap, x: Tensor, reduce_op: str, name: str = OP
) -> PreparedKernel:
    """What launches such calls. The ranks compile together, by a name: one may call in place and another one not."""
    from ...kernels.all_reduce.cuda_kernel import AllReduceLauncher

    config: AllReduceConfig = choice.how

    def make(workspace: Any) -> AllReduceLauncher:
        used = replace(config, in_turn=sends_in_turn(where))
        return AllReduceLauncher(workspace, x.numel(), x.dtype, reduce_op, x.device, used)

    key = x.numel(), x.dtype, reduce_op, config
    return prepare_kernel(choice, where, name, key, make, same=(name, config.form, x.dtype, reduce_op))
