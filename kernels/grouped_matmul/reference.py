"""What grouped_matmul computes, with torch's grouped product. Nothing of it waits for a GPU."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import silu


def ends_within(offs: Tensor, rows: int) -> Tensor:
    """``offs``, or, where they do not rise or end within ``rows`` rows, the nearest that do."""
    return offs.clamp(0, rows).cummax(0).values.int()


def experts_of_rows(offs: Tensor, rows: int) -> Tensor:
    """[rows]: the expert of each row, the number of experts for those of none."""
    offs = ends_within(offs, rows)
    return torch.searchsorted(offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True)


def reference_grouped_matmul(
    A: Tensor, B: Tensor, offs: Tensor, rows: Tensor | None, bias: Tensor | None
) -> Tensor:
    """[R, N] of A [T, K], B [E, K, N], offs [E], rows [R] and bias [E, N]. Rows of no expert hold anything."""
    taken = A.contiguous() if rows is None else A[rows.long().clamp(0, A.shape[0] - 1)]
    if taken.shape[0] == 0:  # torch's looks at strides of nothing, too
        return A.new_empty(0, B.shape[2])
    B = B if B.is_contiguous() or B.mT.is_contiguous() else B.contiguous()
    # On the CPU as the kernel: rounded once, with the bias. A GPU that has none multiplies 16 bits at its own speed.
    dtype = torch.float32 if bias is not None and A.device.type == "cpu" else A.dtype
    out = torch._grouped_mm(taken.to(dtype), B.to(dtype), ends_within(offs, taken.shape[0]))
    if bias is not None:
        out = out + bias.to(dtype)[experts_of_rows(offs, out.shape[0]).clamp(max=B.shape[0] - 1)]
    return out.to(A.dtype)


def activated(both: Tensor, *, swiglu: bool) -> Tensor:
    """With ``swiglu`` silu of the first half of columns, times the second."""
    if not swiglu:
        return both
    gate, up = both.chunk(2, -1)
    return silu(gate) * up
