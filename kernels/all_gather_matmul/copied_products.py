"""Copy engines push the shards while products are computed of what has arrived: float32, and fp8 around torch's kernel.

float32. On the current stream: acquire kernel, the persistent Triton GEMM for each B, the copy of A if it is returned,
and the end of the epoch. On the copy stream after the acquire kernel: the pushes (device/comm/copy_engine.py). Who
writes and who waits: triton_kernel.py.

fp8. On the current stream: acquire kernel, the products of the own rows, for each peer a wait for its slot and the
products of its rows, and the end of the epoch. On the copy stream: the own rows, their scales and then a flag, to one
peer after the other. Who waits: `arrive` of acquire.cu.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedPiece, CopyEngine
from ..device.gemm.scaling import ScaledTensors, ScaleKind, scaled_mm_out
from ..device.jit.ahead import CompilableProgram
from ..device.jit.launch import compiling
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


def prepare_gather_kernels(
    workspace: Workspace[Layout],
    call: GatherKernelCall,
    config: AllGatherMatmulConfig,
    timeout_ns: int,
) -> list[TritonAllGatherMatmul]:
    """A kernel for each B, compiled, for ``copy_engine_all_gather_matmul``.

    Args:
        call: its shard is contiguous, of each B rows or columns are; ``why_no_triton_gather`` says nothing of any.
    """
    a, bs = call.a, call.bs
    engine_of(workspace)
    kernels = []
    acquire.load()
    with compiling():  # Triton compiles at a launch
        for i, b in enumerate(bs):
            kernel = TritonAllGatherMatmul(workspace, a, b, config, num_sms=call.num_sms)
            final = i == len(bs) - 1 and not call.return_A
            c = a.new_empty(workspace.world_size, a.shape[0], b.shape[1])
            kernel.launch(0, a, b, c, final=final, timeout_ns=timeout_ns)
            kernels.append(kernel)
    return kernels


def copied_programs(
    call: GatherKernelCall, config: AllGatherMatmulConfig, world_size: int
) -> list[CompilableProgram]:
    """What ``prepare_gather_kernels`` compiles."""
    last = len(call.bs) - 1
    return [
        acquire.PROGRAM,
        *(
            triton_gather_program(call.a, b, config, world_size, final=i == last and not call.return_A)
            for i, b in enumerate(call.bs)
        ),
    ]


def copy_engine_all_gather_matmul(
    workspace: Workspace[Layout],
    kernels: list[TritonAllGatherMatmul],
    call: GatherKernelCall,
    config: AllGatherMatmulConfig,
    timeout_ns: int,
) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
    """The gathered shards [W, m, K] if wanted, and the products, each [W, m, N_i].

    Args:
        kernels: what ``prepare_gather_kernels`` made for such tensors.
    """
    a, bs, return_A = call.a, call.bs, call.return_A
    engine = engine_of(workspace)
    products = [a.new_empty(workspace.world_size, a.shape[0], b.shape[1]) for b in bs]
    buffer = workspace.next_buffer()
    gathered: torch.Tensor | None = None
    with engine.pushing(buffer, a, config.chunk_rows, timeout_ns):
        for i, (kernel, b, c) in enumerate(zip(kernels, bs, products, strict=True)):
            final = i == len(bs) - 1 and not return_A
            kernel.launch(buffer, a, b, c, final=final, timeout_ns=timeout_ns)
        if return_A:  # the GEMM has waited for all of it
            gathered = torch.empty_like(kernels[0].gathered(buffer))
            gathered.copy_(kernels[0].gathered(buffer))
            gathered[workspace.rank].copy_(a)
            acquire.end_epoch(workspace, buffer, torch.cuda.current_stream().cuda_stream)
    return gathered, products


class _Arriving(NamedTuple):
    """What comes from a rank: the wait for it, and where its rows and their scales lie then."""

    src: int
    arrival: acquire.Arrival
    rows: torch.Tensor
    scales: torch.Tensor


class AllGatherScaledMatmulCopied:
    """This op on one problem and one workspace: prepared once, called often.

    Args:
        workspace: with room for ``copied_layout``, whose buffers copy engines write.
        example: a call of the sizes and strides that every call has.
        biased: whether each B has a bias.
    """

    def __init__(
        self, workspace: Workspace[Layout], example: GatherKernelCall, biased: Sequence[bool]
    ) -> None:
        scaled, (m, k), size = example.scaled, example.a.shape, workspace.world_size
        assert scaled is not None
        problem = example.problem(size)
        if not workspace.layout.holds(copied_layout(problem)):
            raise ValueError(
                f"workspace: {workspace.layout} is too small for shards of {m} x {2 * k} numbers"
            )
        self._engine = engine_of(workspace)
        acquire.load()
        self.workspace, self._scaled, self._biased = workspace, scaled, list(biased)
        self._rows, self._columns, self._stride = m, 2 * k, 2 * example.a.stride(0)
        slot, offset = slot_bytes(problem), scales_offset(problem)
        # In a peer's buffer: of the own rows, and of their scales.
        self._places = workspace.rank * slot, workspace.rank * slot + offset
        self._arriving: list[list[_Arriving]] = []  # of each buffer, in the order in which rows come
        for buffer in range(NUM_BUFFERS):
            slots = workspace.buffer(workspace.rank, buffer, (size, slot), torch.uint8)
            self._arriving.append([])
            for src in ((workspace.rank + step) % size for step in range(1, size)):
                rows = slots[src, : 2 * m * k].view(scaled.types[0]).view(m, 2 * k)
                scales = slots[src, offset : offset + scaled.sent_bytes(m, k)].view(torch.float32).view(-1, 1)
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
        """The copies, and the products.

        Args:
            tensors: the local shard, in any number of dimensions; the Bs; the scales of A, of torch's shape, and of
                each B; and the biases that there are.
            results: the products [W, m, N_i]: each a whole storage, whatever its sizes and strides say.
            stream: the current one, a CUstream as an integer.

        Raises:
            PeerTimeout, CallAbandoned: as ``Workspace.raise_if_broken``.
        """
        workspace, scaled, m = self.workspace, self._scaled, self._rows
        of = ScaledTensors.of(tensors, self._biased)
        own = of.a.as_strided((m, self._columns), (self._stride, 1)).contiguous()
        given = of.a_scale  # of its own rows, or of those of all ranks
        if scaled.kind is ScaleKind.ROWS:
            given = given.reshape(-1, 1)
        pieces = [CopiedPiece(own.data_ptr(), self._places[0], own.numel())]
        if scaled.travels:
            pieces.append(CopiedPiece(given.data_ptr(), self._places[1], 4 * m))

        def multiply(src: int, rows: torch.Tensor, arrived: torch.Tensor) -> None:
            scales = arrived if scaled.travels else given
            if scaled.kind is ScaleKind.ROWS and not scaled.travels:
                scales = given[src * m : (src + 1) * m]
            for b, b_scale, bias, result in zip(of.bs, of.b_scales, of.biases, results, strict=True):
                out = result.as_strided((m, b.shape[1]), (b.shape[1], 1), src * m * b.shape[1])
                scaled_mm_out(scaled, rows, b, (scales, b_scale), bias, out)

        # Three frames: this and two more, on the fast path and on the slow one.
        workspace.raise_if_broken(SCALED_OP, inside=3)
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
