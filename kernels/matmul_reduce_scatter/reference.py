"""What the op computes, in plain torch and collectives: the unfused path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from .configs import Epilogue

# The newer name of reduce_scatter_tensor, which warns from torch 2.13 on.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def reference_matmul_reduce_scatter(
    A: torch.Tensor,
    B: torch.Tensor,
    scatter_dim: int,
    group: ProcessGroup,
    epilogue: Epilogue,
    terms: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """The own part of ``sum over ranks of A @ B``, cut along ``scatter_dim``; and what the own rank's epilogue makes of
    it.

    Args:
        A: [..., K], ``scatter_dim`` not negative.
        B: [K, N].
        epilogue: its ``out_dtype`` is that of what is summed, too.
        terms: its bias, as long as a row of the result, and its residual, like the result. Both are added in float32 at
            least.

    Returns:
        contiguous, ``(A @ B).shape`` with ``scatter_dim`` divided by the world size.
    """
    shape = [*A.shape[:-1], B.shape[1]]
    shape[scatter_dim] //= group.size()
    dtype = epilogue.out_dtype
    # A sum of float16 numbers may be too large for one where their average is not.
    wide = torch.float32 if epilogue.average and dtype == torch.float16 else dtype
    product = (A @ B).to(wide).movedim(scatter_dim, 0).contiguous()
    out = product.new_empty(product.shape[0] // group.size(), *product.shape[1:])
    if out.numel():
        _reduce_scatter(out, product, group=group)
    if epilogue.average:
        out /= group.size()
    own = out.to(dtype).movedim(0, scatter_dim)
    if len(terms) == 1:
        # In float32 inside of the addition, and rounded once: the same bits in one kernel.
        own = own + terms[0]
    elif terms:
        total = own.to(torch.promote_types(own.dtype, torch.float32))
        for term in terms:
            total = total + term
        own = total.to(own.dtype)
    # reshape, not contiguous(): that keeps odd strides of dimensions of size 1.
    return own.reshape(-1).view(shape)
