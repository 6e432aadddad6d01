"""Copy engines push the shards while products are computed of what has arrived: float32, and fp8 around torch's kernel.

float32. On the current stream: acquire kernel, the persistent Triton GEMM for each B, the copy of A if it is returned,
and the end of the epoch. On the copy stream behind the acquire kernel: the pushes (device/comm/copy_engine.py). Who
writes and who waits: triton_kernel.py.

fp8. On the current stream: acquire kernel, the products of the own rows, for each peer a wait for its slot and the
products of its rows, and the end of the epoch. On the copy stream: the own rows, their scales and then a flag, to one
peer after the other. Who waits: `arrive` of acquire.cu.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...symm_mem.layout import NUM_BUFFERS, Layout
from ...symm_mem.workspace import Workspace
from ..device.comm import acquire
from ..device.comm.copy_engine import CopiedPiece, CopyEngine
from ..device.gemm.scaling import ScaleKind, aligned_scale
from ..device.jit.launch import compiling
from .configs import AllGatherMatmulConfig, GatherKernelCall, choose_all_gather_matmul, copied_layout
from .estimate import scales_offset, slot_bytes
from .triton_kernel import TritonAllGatherMatmul

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
        self._slot, self._offset = slot_bytes(problem), scales_offset(problem)
        # The peers in the order in which their rows come.
        self._sources = [(workspace.rank + step) % size for step in range(1, size)]
        self._arrivals = [
            {src: acquire.Arrival(workspace, buffer, src) for src in self._sources}
            for buffer in range(NUM_BUFFERS)
        ]
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
        workspace, scaled, count, m = self.workspace, self._scaled, len(self._biased), self._rows
        (a, *bs), rest = tensors[: count + 1], tensors[count + 1 :]
        a_scale, b_scales = rest[0], rest[1 : count + 1]
        given = iter(rest[count + 1 :])
        biases = [next(given) if biased else None for biased in self._biased]
        own = a.as_strided((m, self._columns), (self._stride, 1)).contiguous()
        own_scale = a_scale
        if scaled.kind is ScaleKind.ROWS:  # its own rows', or those of all
            own_scale = a_scale.reshape(-1, 1)
        pieces = [CopiedPiece(own.data_ptr(), 0, own.numel())]
        if scaled.travels:
            pieces.append(CopiedPiece(own_scale.data_ptr(), self._offset, 4 * m))
        # Three frames: this and two more, on the fast path and on the slow one.
        workspace.raise_if_broken(SCALED_OP, inside=3)
        try:
            with workspace.lock:
                buffer = workspace.next_buffer()
                self._engine.start_pieces(buffer, pieces, self._slot, timeout_ns)
                for src in (workspace.rank, *self._sources):
                    rows, scale = own, own_scale
                    if src != workspace.rank:
                        self._arrivals[buffer][src].launch(timeout_ns, stream)
                        rows, scale = self._arrived(buffer, src, own_scale)
                    if scaled.kind is ScaleKind.ROWS and not scaled.travels:
                        scale = own_scale[src * m : (src + 1) * m]
                    for b, b_scale, bias, result in zip(bs, b_scales, biases, results, strict=True):
                        how = bias, None, scaled.out_dtype, not scaled.promote
                        out = result.as_strided((m, b.shape[1]), (b.shape[1], 1), src * m * b.shape[1])
                        scales = aligned_scale(scale), aligned_scale(b_scale)
                        torch.ops.aten._scaled_mm.out(rows, b, *scales, *how, out=out)
                self._ends[buffer](stream)
                self._engine.join(buffer)  # the shard may be overwritten then
        except BaseException as e:
            workspace.abandon(e)  # the peers may wait for what was not launched
            raise

    def _arrived(self, buffer: int, src: int, own_scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A peer's rows and their scales, where they lie."""
        w, (dtype, _) = self.workspace, self._scaled.types
        slots = w.buffer(w.rank, buffer, (w.world_size, self._slot), torch.uint8)
        slot = slots[src]
        rows = slot[: self._rows * self._columns].view(dtype).view(self._rows, self._columns)
        if not self._scaled.travels:
            return rows, own_scale
        return rows, slot[self._offset :][: 4 * self._rows].view(torch.float32).view(-1, 1)
