"""All ranks' tokens multiplied on CUDA while they come: copy engines send them.

Who writes and who waits is as for ``AllGatherProductsCopied``. Rows are copied into their order in two steps: those of
own tokens, and those of peers' when all have come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ....kernels.all_gather_matmul.configs import CopiedConfig, GatherKernelCall, copied_layout
from ....kernels.device.capability import runs_on, why_no_kernel_on
from ....kernels.grouped_matmul import OP
from ....kernels.grouped_matmul.configs import sends_by_copies
from ....symm_mem.backends.cuda_state import current_stream_of
from ....symm_mem.heap.heap import Heap
from ....symm_mem.timeouts import timeout_in_ns
from ...dispatch.choice import Choice, prepare_kernel
from ...dispatch.plan import num_sms, preferred_kernel
from ...dispatch.stream_order import in_stream_order
from ...dispatch.workspaces import COPIED
from .grouped_matmul import Term, as_the_kernel_takes, multiply_in_order, prepare_groups

if TYPE_CHECKING:
    from ....kernels.all_gather_matmul.copied_products import AllGatherProductsCopied


def choose_copies(A_shard: Tensor, group: ProcessGroup) -> Choice | None:
    """The choice of a call on CUDA whose tokens copy engines send; None: others send these. By what all ranks know."""
    device, (m, k), preferred = A_shard.device, A_shard.shape, preferred_kernel()
    if A_shard.dtype == torch.float32 or group.size() == 1:
        return None
    if why_no_kernel_on("grouped_matmul", device) or not runs_on("device/comm/acquire.cu", device):
        return None
    if preferred != "copy_engine" and (preferred is not None or not sends_by_copies(m, k)):
        return None

    def programs() -> Sequence[Any]:
        from ....kernels.device.comm import acquire
        from ....kernels.grouped_matmul import take_rows

        return [acquire.PROGRAM, take_rows.PROGRAM]

    problem = _example(A_shard).problem(group.size())
    return Choice(CopiedConfig.algorithm, kind=COPIED, layout=copied_layout(problem), programs=programs)


def _example(A_shard: Tensor) -> GatherKernelCall:
    return GatherKernelCall(A_shard, [], num_sms(A_shard.device))


def multiply_arriving(
    choice: Choice,
    where: Heap,
    given: tuple[Tensor, Tensor, Tensor],
    terms: Sequence[Term],
    *,
    return_A: bool,
    swiglu: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """As the op. ``given``: this rank's tokens, rows and offs."""
    from ....kernels.all_gather_matmul.copied_products import AllGatherProductsCopied

    (A_shard, rows, offs), size = given, where.world_size
    m, k = A_shard.shape
    with in_stream_order(A_shard.device):
        own, terms = as_the_kernel_takes(A_shard.contiguous(), terms)
        order, of = (rows.contiguous(), offs.contiguous()), (where.rank, size)
        call = ArrivingTokens(own, terms, order, of, return_A=return_A, swiglu=swiglu)

        def make(workspace: Any) -> AllGatherProductsCopied:
            call.prepare()
            return AllGatherProductsCopied(workspace, _example(own))

        ready = prepare_kernel(choice, where, OP, ("grouped", m, k, own.dtype), make)
        kernel: AllGatherProductsCopied = ready.kernel
        call.prepare()
        timeout_ns = timeout_in_ns(where.group_name)
        ready.workspace.raise_if_broken(OP)
        kernel.as_they_come(own, None, call.take, timeout_ns, current_stream_of(own))
    return call.every, call.outs


class ArrivingTokens:
    """A call's tensors. ``every``: the gathered tokens, if they are returned."""

    def __init__(
        self,
        own: Tensor,
        terms: Sequence[Term],
        index: tuple[Tensor, Tensor],
        of: tuple[int, int],
        *,
        return_A: bool,
        swiglu: bool = False,
    ) -> None:
        from ....kernels.grouped_matmul.take_rows import Own

        (m, k), (rank, size), (self._rows, self._offs) = own.shape, of, index
        self._terms, self._swiglu = terms, swiglu
        self._rank, self._last = rank, (rank - 1) % size
        self._own = Own(rank * m, (rank + 1) * m, size * m)
        self._taken = own.new_empty(self._rows.shape[0], k)
        self.outs = list[Tensor]()
        self.every = own.new_empty(size * m, k) if return_A else None

    def prepare(self) -> None:
        """Compiles, in the current context, what peers would else wait for."""
        from ....kernels.grouped_matmul import take_rows

        take_rows.PROGRAM.function("take_rows")
        if self._rows.shape[0]:
            prepare_groups(self._taken, self._terms, swiglu=self._swiglu)

    def take(self, src: int, tokens: Tensor, _: Tensor | None) -> None:
        """Those of rank ``src`` are there; those of the rank before this one come last."""
        from ....kernels.grouped_matmul.take_rows import take_rows

        m, k = tokens.shape
        if self.every is not None:
            self.every[src * m : (src + 1) * m].copy_(tokens)
        if src == self._rank:
            take_rows(tokens, self._rows, self._offs, self._taken, self._own)
        elif src == self._last:
            place = tokens.storage_offset() - src * m * k  # of rank 0's
            every = tokens.as_strided((self._own.tokens, k), (k, 1), place)
            take_rows(every, self._rows, self._offs, self._taken, self._own, takes_own=False)
            self.outs = multiply_in_order(self._taken, self._terms, self._offs, swiglu=self._swiglu)
