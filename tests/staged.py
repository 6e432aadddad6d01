"""A process group for ranks that share a GPU: what lies there goes through gloo by way of the CPU.

NCCL takes no two ranks on one GPU, and gloo ends the process where functional collectives meet tensors on one.
Everything is done when a collective returns; nothing of it may be captured.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

NAME = "staged"


class StagedGroup(dist.ProcessGroup):
    """The collectives that torch's functional ones and the tests use, on tensors of any device."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timeout)

    def _get_sequence_number_for_group(self) -> int:
        return self._gloo._get_sequence_number_for_group()

    def getBackendName(self) -> str:
        return NAME

    # A group without backends of torch's has nowhere to keep these.
    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        for x in tensors:
            staged = x.cpu().contiguous()
            average = opts.reduceOp == dist.ReduceOp.AVG  # which gloo has not
            reduce_op = dist.ReduceOp.SUM if average else opts.reduceOp
            self._gloo.allreduce([staged], reduce_op).wait()
            x.copy_(staged / self.size() if average else staged)
        return _done(tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self.allreduce(tensors, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        for x in tensors:
            staged = x.cpu().contiguous()
            self._gloo.broadcast([staged], opts).wait()
            x.copy_(staged)
        return _done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        for outs, x in zip(outputs, inputs, strict=True):
            own = x.cpu().contiguous()
            staged = [torch.empty_like(own) for _ in outs]
            self._gloo.allgather([staged], [own]).wait()
            for out, found in zip(outs, staged, strict=True):
                out.copy_(found)
        return _done(outputs)

    def _allgather_base(self, output: Tensor, x: Tensor, opts: Any = None) -> Any:
        return self.allgather([list(output.view(self.size(), *x.shape))], [x])

    all_gather_single = _allgather_base  # its name since torch 2.13

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, x in zip(outputs, inputs, strict=True):
            self._allgather_base(output, x)
        return _done(outputs)

    def _reduce_scatter_base(self, output: Tensor, x: Tensor, opts: Any) -> Any:
        whole = x.clone()
        self.allreduce([whole], opts)
        output.copy_(whole.view(self.size(), *output.shape)[self.rank()])
        return _done(output)

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> Any:
        for output, x in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, x, opts)
        return _done(outputs)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Any:
        staged = torch.empty_like(outputs[0], device="cpu")
        self._gloo.scatter([staged], [[x.cpu() for x in parts] for parts in inputs], opts).wait()
        outputs[0].copy_(staged)
        return _done(outputs)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Any:
        staged = [[torch.empty_like(x, device="cpu") for x in outs] for outs in outputs]
        self._gloo.gather(staged, [x.cpu().contiguous() for x in inputs], opts).wait()
        for outs, found in zip(outputs, staged, strict=True):
            for out, x in zip(outs, found, strict=True):
                out.copy_(x)
        return _done(outputs)

    def barrier(self, opts: Any = None) -> Any:
        self._gloo.barrier().wait()
        return _done(None)


def _done(result: Any) -> Any:
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(result)
    return torch._C._distributed_c10d._create_work_from_future(future)


def register() -> None:
    """Makes ``NAME`` a backend of ``init_process_group`` and ``new_group``."""
    dist.Backend.register_backend(NAME, StagedGroup, devices=["cpu", "cuda"])
