"""Which kernel computes reduce_scatter(A @ B) on CUDA, and the call of it.

16-bit operands go to kernel.cu, float32 to the Triton kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...symm_mem.workspace import Layout, Workspace
from ..device import gemm
from ..device.launch import compiling, why_not
from . import configs, host
from .cuda_kernel import MatmulReduceScatterBulk
from .triton_kernel import MatmulReduceScatter


@dataclass(frozen=True, eq=False)
class Choice:
    """How calls of one kind are run.

    ``half_bytes`` of a half of the workspace and ``flags`` for each rank are what it takes. ``pays``: it is thought
    to be faster than a reduce-scatter behind the product.
    """

    algorithm: str
    config: configs.BulkConfig | configs.Config
    half_bytes: int
    flags: int
    pays: bool


_choices: dict[tuple[object, ...], Choice | str] = {}
_MOST_CHOICES = 4096  # kept before all are forgotten


def choose(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> Choice | str:
    """How to run a call, or why no kernel can.

    The same on all ranks whose tensors have the same sizes, strides and dtypes.

    Args:
        a: [L, W, m, K]. b: [K, N]. Both begin at multiples of 16 bytes.
    """
    key = (a.shape, a.stride(), a.dtype, b.shape, b.stride(), num_sms)
    found = _choices.get(key)
    if found is None:
        if len(_choices) >= _MOST_CHOICES:
            _choices.clear()
        found = _choices[key] = why_not(a, b) or _chosen(a, b, num_sms)
    return found


def _chosen(a: torch.Tensor, b: torch.Tensor, num_sms: int) -> Choice:
    (batches, world_size, m, k), n = a.shape, b.shape[1]
    if a.dtype in gemm.DTYPES:
        config = configs.choose_bulk(m, n, k, world_size, num_sms, batches)
        pays = configs.bulk_pays(m, n, k, world_size, num_sms, batches)
        return Choice("bulk", config, *configs.bulk_needs(m, n, config, world_size, batches), pays)
    stored = configs.choose(m, n, k, world_size, a.dtype, num_sms, batches)
    nbytes = world_size * batches * m * n * a.element_size()
    flags = configs.flags_per_rank(m, n, stored, batches)
    return Choice("tma_store", stored, nbytes, flags, batches * m >= 64)


def run(
    choice: Choice,
    workspace: Workspace[Layout],
    a: torch.Tensor,
    b: torch.Tensor,
    num_sms: int,
    timeout_ns: int,
    *,
    average: bool,
) -> torch.Tensor:
    """The own part of the sum, or of the mean, [L, m, N]."""
    config, key = choice.config, (choice, average)
    out = a.new_empty((a.shape[0], a.shape[2], b.shape[1]))
    kernel = workspace.prepared.get(key)
    if kernel is None:

        def make() -> MatmulReduceScatterBulk | MatmulReduceScatter:
            if isinstance(config, configs.BulkConfig):
                return MatmulReduceScatterBulk(workspace, a, b, config, average=average, num_sms=num_sms)
            made = MatmulReduceScatter(workspace, a, b, config, average=average, num_sms=num_sms)
            with compiling():  # Triton compiles at a launch
                made.launch(0, a, b, out, timeout_ns=timeout_ns)
            return made

        # Ranks compile together: no wait counts what a peer still compiles. The strides are left out: each rank may
        # have others.
        same = (host.OP, a.shape, b.shape, a.dtype, average, config, num_sms)
        workspace.heap.prepare(host.OP, same, make)
        kernel = workspace.prepared[key] = make()
    kernel.launch(workspace.next_half(), a, b, out, timeout_ns=timeout_ns)
    return out
