"""Collectives that run concurrently with what follows them, on CUDA: kernels/async_collectives by copy engines."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor

from ...kernels.async_collectives.host import async_layout
from ...symm_mem.backends import cuda_state
from ...symm_mem.heap.heap import Heap
from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.timeouts import timeout_in_ns
from ...symm_mem.workspace import Workspace
from ..dispatch import plan
from ..dispatch.choice import Choice, prepare_kernel, unfused
from ..dispatch.launch_cache import remember_call
from ..dispatch.plan import Plan
from ..dispatch.staging import aligned
from ..dispatch.stream_order import in_stream_order
from .call import AsyncCall, Started, free_buffer, hold_started


class CallsOnStream:
    """What calls of one kind and size find again on a CUDA stream."""

    def __init__(self, workspace: Workspace[Layout], collective: Any, call: AsyncCall) -> None:
        self.workspace, self.collective = workspace, collective
        self._op, self._wait_op = call.start, call.wait
        self._kind, self._more = call.kind, call[2:]  # of a call like it, without its operand
        size, rank = workspace.world_size, workspace.rank
        self.shape = tuple(call.result_shape(size))
        self.own = 0 if call.gathers else rank * call.part_bytes(size)
        self._plan = Plan("copy_engine", workspace_bytes=workspace.layout.bytes)
        self.placed = [
            workspace.buffer(rank, buffer, self.shape, call.x.dtype)
            for buffer in range(NUM_BUFFERS if call.placed else 0)
        ]

    def call(
        self, tensors: Sequence[Tensor], results: Sequence[Tensor], timeout_ns: int, stream: int
    ) -> None:
        """As ``launch_cache.Caller``: a start of x, contiguous and aligned, whose token is the result."""
        (x,), (token,) = tensors, results
        hold_started(token, self.start(AsyncCall(self._kind, x, *self._more), x, timeout_ns))

    def start(self, call: AsyncCall, sent: Tensor, timeout_ns: int) -> Started:
        """``sent``: x, contiguous and aligned; its copy if x is not."""
        workspace = self.workspace
        buffer = free_buffer(workspace.started, self._op)
        plan.this_thread.plan = self._plan
        workspace.raise_if_broken(self._op, 6)
        workspace.take_buffer(buffer)
        try:
            self.collective.send(buffer, sent.data_ptr(), timeout_ns)
        except BaseException as e:
            workspace.abandon(e)
            raise
        release = partial(self._release, buffer) if call.placed else None
        started = Started(call, partial(self._wait, call, sent, buffer, timeout_ns), release)
        started.holds(workspace, buffer)
        return started

    def _wait(self, call: AsyncCall, x: Tensor, buffer: int, timeout_ns: int) -> Tensor:
        with in_stream_order(x.device):
            self.workspace.raise_if_broken(self._wait_op, 3)
            out = self.placed[buffer] if call.placed else x.new_empty(self.shape)
            stream = cuda_state.current_stream_of(x)
            self.collective.receive(buffer, x.data_ptr() + self.own, out.data_ptr(), timeout_ns, stream)
        return out.view(self.shape) if call.placed else out

    def _release(self, buffer: int, gathered: Tensor) -> None:
        with in_stream_order(gathered.device):
            self.collective.release(buffer, cuda_state.current_stream_of(gathered))


def choose_async(call: AsyncCall, world_size: int) -> Choice:
    """By copy engines, or why these do not take the call."""
    from ...kernels.async_collectives.cuda_kernel import VECTOR, async_program
    from ...kernels.device.comm import acquire

    part = call.part_bytes(world_size)
    if part % VECTOR:
        return unfused(f"a part has {part} bytes, no multiple of {VECTOR}")
    return Choice(
        "copy_engine",
        kind=call.workspace,
        layout=async_layout(part, world_size, call.placed),
        programs=lambda: [acquire.PROGRAM, async_program(world_size)],
    )


def start_on_cuda(choice: Choice, where: Heap, call: AsyncCall) -> Started:
    from ...kernels.async_collectives.cuda_kernel import AsyncCollective, AsyncProblem

    problem = AsyncProblem(call.part_bytes(where.world_size), call.reduce_op, call.x.dtype, call.placed)
    with in_stream_order(call.x.device):
        ready = prepare_kernel(
            *(choice, where, call.start, (problem, tuple(call.result_shape(where.world_size)))),
            lambda workspace: CallsOnStream(workspace, AsyncCollective(workspace, problem), call),
        )
        sent = aligned(call.x.contiguous())
        started: Started = ready.kernel.start(call, sent, timeout_in_ns(where.group_name))
    known = (call.reduce_op, call.placed, call.group_size), [call.x]
    remember_call(call.start, known, [sent], [call.x.new_empty(0)], ready)
    return started
