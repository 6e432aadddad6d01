"""Copy engines push the shards while products are computed of what has arrived: float32; and around torch's kernels
fp8, or where kernel.cu does not run 16 bits.

float32. On the current stream: acquire kernel, the persistent Triton GEMM for each B, the copy of A if it is returned,
and the end of the epoch. On the copy stream after the acquire kernel: the pushes (device/comm/copy_engine.py). Who
writes and who waits: triton_kernel.py.

Around torch's. On the current stream: acquire kernel, the products of the own rows, for each peer a wait for its slot
and the products of its rows, and the end of the epoch. On the copy stream: the own rows, of fp8 their scales, and then
a flag, to one peer after the other. Who waits: `arrive` of acquire.cu.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedPiece, CopyEngine
from ..device.gemm.scaling import ScaledProducts, ScaledTensors, ScaleKind, scaled_mm_out
from ..device.jit.ahead import CompilableProgram
from ..device.jit.launch import compiling
from . import host
from .configs import AllGatherMatmulConfig, GatherKernelCall, choose_all_gather_matmul, copied_layout
from .estimate import scales_offset, slot_bytes
from .triton_kernel import TritonAllGatherMatmul, triton_gather_program

SCALED_OP = "fused_all_gather_scaled_matmul"
_ENGINE = "copy engine"


def engine_of(workspace: Workspace[Layout]) -> CopyEngine:
    """That of a workspace whose buffers copy engines write."""
    if _ENGINE not in workspace.copy_streams:
        workspace.copy_streams[_ENGINE] = CopyEngine(workspace)
    found: CopyEngine = workspace.copy_streams[_ENGINE]
    return found


def configure(call: GatherKernelCall, world_size: int) -> AllGatherMatmulConfig:
    """One configuration for all products of a shard [m, K]: that of the widest B."""
    (m, k), n = call.a.shape, max(b.shape[1] for b in call.bs)
    return choose_all_gather_matmul(m, n, k, world_size, call.a.dtype, call.num_sms)


def copied_programs(
    call: GatherKernelCall, config: AllGatherMatmulConfig, world_size: int
) -> list[CompilableProgram]:
    """What ``AllGatherMatmulCopied`` compiles."""
    last = len(call.bs) - 1
    return [
        acquire.PROGRAM,
        *(
            triton_gather_program(call.a, b, config, world_size, final=i == last and not call.return_A)
            for i, b in enumerate(call.bs)
        ),
    ]


class AllGatherMatmulCopied:
    """This op of float32 on one problem and one workspace: compiled once, called often.

    Args:
        workspace: with room for ``configs.copied_gather_layout``, whose buffers copy engines write.
        example: a call of the sizes and strides that every call has. Its shard is contiguous, of each B rows or columns
            are; ``why_not`` says nothing of any.
    """

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, config: AllGatherMatmulConfig
    ) -> None:
        a, bs, size = example.a, example.bs, workspace.world_size
        self.workspace, self._engine, self._chunk_rows = workspace, engine_of(workspace), config.chunk_rows
        acquire.load()
        self._kernels = [TritonAllGatherMatmul(workspace, a, b, config, num_sms=example.num_sms) for b in bs]
        outs = [a.new_empty(size, a.shape[0], b.shape[1]) for b in bs]
        with compiling():  # Triton compiles at a launch
            self._multiply(0, (a, *bs), outs, 0, return_A=example.return_A)

    def _multiply(
        self,
        buffer: int,
        tensors: Sequence[torch.Tensor],
        outs: Sequence[torch.Tensor],
        timeout_ns: int,
        *,
        return_A: bool,
    ) -> None:
        a, *bs = tensors
        for i, (kernel, b, c) in enumerate(zip(self._kernels, bs, outs, strict=True)):
            final = i == len(bs) - 1 and not return_A
            kernel.launch(buffer, a, b, c, final=final, timeout_ns=timeout_ns)

    def call(
        self, tensors: Sequence[torch.Tensor], results: Sequence[torch.Tensor], timeout_ns: int, stream: int
    ) -> None:
        """The copies, and the products.

        Args:
            tensors: the local shard [m, K] and the Bs.
            results: the products [W, m, N_i], and after them the gathered shards [W, m, K] if they are wanted.
            stream: the current one, a CUstream as an integer.
        """
        a, outs = tensors[0], results[: len(self._kernels)]
        returned = results[len(outs) :]
        buffer = self.workspace.next_buffer()
        with self._engine.pushing(buffer, a, self._chunk_rows, timeout_ns):
            self._multiply(buffer, tensors, outs, timeout_ns, return_A=bool(returned))
            for gathered in returned:  # the GEMM has waited for all of it
                gathered.copy_(self._kernels[0].gathered(buffer))
                gathered[self.workspace.rank].copy_(a)
                acquire.end_epoch(self.workspace, buffer, stream)


class _Arriving(NamedTuple):
    """What comes from a rank: the wait for it, and where its rows and their scales lie then."""

    src: int
    arrival: acquire.Arrival
    rows: torch.Tensor
    scales: torch.Tensor | None


class AllGatherProductsCopied:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``copied_layout``, whose buffers copy engines write.
        example: a call of the sizes and strides that every call has.
        biased: of fp8 operands, whether each B has a bias.
    """

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, biased: Sequence[bool] = ()
    ) -> None:
        scaled, (m, k), size = example.scaled, example.a.shape, workspace.world_size
        problem = example.problem(size)
        dtype, columns = (example.a.dtype, k) if scaled is None else (scaled.types[0], 2 * k)
        if not workspace.layout.holds(copied_layout(problem)):
            raise ValueError(
                f"workspace: {workspace.layout} is too small for shards of {m} x {columns} numbers"
            )
        self._engine = engine_of(workspace)
        acquire.load()
        self.workspace, self._scaled, self._biased = workspace, scaled, list(biased)
        self._rows, self._columns = m, columns
        self._stride = example.a.stride(0) * (columns // k)
        slot, offset = slot_bytes(problem), scales_offset(problem)
        # In a peer's buffer: of the own rows, and of their scales.
        self._places = workspace.rank * slot, workspace.rank * slot + offset
        self._arriving: list[list[_Arriving]] = []  # of each buffer, in the order in which rows come
        for buffer in range(NUM_BUFFERS):
            slots = workspace.buffer(workspace.rank, buffer, (size, slot), torch.uint8)
            self._arriving.append([])
            for src in ((workspace.rank + step) % size for step in range(1, size)):
                rows = slots[src, : 2 * m * k].view(dtype).view(m, columns)
                scales = None
                if scaled is not None:
                    sent = scaled.sent_bytes(m, k)
                    scales = slots[src, offset : offset + sent].view(torch.float32).view(-1, 1)
                arrival = acquire.Arrival(workspace, buffer, src)
                self._arriving[buffer].append(_Arriving(src, arrival, rows, scales))
        self._ends = [acquire.end_epoch_launcher(workspace, buffer) for buffer in range(NUM_BUFFERS)]

    def call(
        self,
        tensors: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """The copies, and the products; as ``AllGatherScaledMatmulOneShot.call``, or ``AllGatherMatmulCopied.call``."""
        scaled, m = self._scaled, self._rows
        own = tensors[0].as_strided((m, self._columns), (self._stride, 1)).contiguous()
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], None]
        if scaled is None:
            given, multiply = None, partial(_multiply, tensors[1:], results)
        else:
            of = ScaledTensors.of(tensors, self._biased)
            given = of.a_scale  # of its own rows, or of those of all ranks
            if scaled.kind is ScaleKind.ROWS:
                given = given.reshape(-1, 1)
            multiply = partial(_multiply_scaled, scaled, of._replace(a_scale=given), results)
        # Three frames: this and two more, on the fast path and on the slow one.
        self.workspace.raise_if_broken(host.OP if scaled is None else SCALED_OP, inside=3)
        self.as_they_come(own, given, multiply, timeout_ns, stream)

    def as_they_come(
        self,
        own: torch.Tensor,
        given: torch.Tensor | None,
        multiply: Callable[[int, torch.Tensor, torch.Tensor | None], None],
        timeout_ns: int,
        stream: int,
    ) -> None:
        """Sends the own rows [m, K], contiguous, and calls ``multiply(src, rows, scales)``: for them with the scales
        that are ``given``, then for each peer's, when those are there for what follows on the current stream."""
        workspace = self.workspace
        pieces = [CopiedPiece(own.data_ptr(), self._places[0], own.nbytes)]
        if given is not None and self._scaled is not None and self._scaled.travels:
            pieces.append(CopiedPiece(given.data_ptr(), self._places[1], 4 * self._rows))
        try:
            with workspace.lock:
                buffer = workspace.next_buffer()
                self._engine.start_pieces(buffer, pieces, timeout_ns)
                multiply(workspace.rank, own, given)
                for src, arrival, rows, scales in self._arriving[buffer]:
                    arrival.launch(timeout_ns, stream)
                    multiply(src, rows, scales)
                self._ends[buffer](stream)
                self._engine.join(buffer)  # the shard may be overwritten then
        except BaseException as e:
            workspace.abandon(e)  # the peers may wait for what was not launched
            raise


def _multiply(
    bs: Sequence[torch.Tensor],
    results: Sequence[torch.Tensor],
    src: int,
    rows: torch.Tensor,
    _: torch.Tensor | None,
) -> None:
    """Of rank ``src``; after the products its rows, if these are wanted."""
    for b, result in zip(bs, results, strict=False):
        torch.mm(rows, b, out=_part(result, src, rows.shape[0], b.shape[1]))
    if len(results) > len(bs):
        _part(results[-1], src, *rows.shape).copy_(rows)


def _multiply_scaled(
    scaled: ScaledProducts,
    of: ScaledTensors,
    results: Sequence[torch.Tensor],
    src: int,
    rows: torch.Tensor,
    arrived: torch.Tensor | None,
) -> None:
    """``of`` has the scales of the own rows, or of those of all ranks; ``arrived``: of these rows, if they travel."""
    m = rows.shape[0]
    scales = arrived if scaled.travels and arrived is not None else of.a_scale
    if scaled.kind is ScaleKind.ROWS and not scaled.travels:
        scales = of.a_scale[src * m : (src + 1) * m]
    for b, b_scale, bias, result in zip(of.bs, of.b_scales, of.biases, results, strict=True):
        scaled_mm_out(scaled, rows, b, (scales, b_scale), bias, _part(result, src, m, b.shape[1]))


def _part(result: torch.Tensor, src: int, rows: int, columns: int) -> torch.Tensor:
    """Rank ``src``'s of new results, whatever their shape."""
    return result.as_strided((rows, columns), (columns, 1), src * rows * columns)
