"""A chunk whose exponentials are made by the product itself: no pass reads or overwrites its logits.

Each row's are of its score less a base: the logarithm of the sum over few columns, whose logits are made before.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ....kernels.device.capability import runs_on
from ....kernels.device.gemm.operands import why_not
from ....kernels.linear_cross_entropy.reference import Columns
from ...dispatch.plan import num_sms

_MOST_PREPARED = 64
_KERNEL = "linear_cross_entropy/exponentials.cu"


def exponentials_made_of(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernel takes x [..., H] and weight [V, H]."""
    if x.dtype != torch.bfloat16 or x.device.type != "cuda" or weight.stride(1) != 1:
        return False
    return why_not(x.flatten(0, -2), weight.t()) is None and runs_on(_KERNEL, x.device)


class ExponentialRows:
    """Of rows x [M, H], in the place of logits in blocks: many columns, and few that have their logits.

    Attributes:
        sent: statistics of all these columns.
    """

    def __init__(self, x: Tensor, weight: Tensor, blocks: Sequence[Tensor], columns: Columns) -> None:
        from ....kernels.linear_cross_entropy import exponential_rows, triton_kernel

        self._x, self._columns = x, columns
        many, self._few = blocks
        self._exponentials, count = many.t(), many.shape[1]
        self.sent = triton_kernel.launch_statistics([self._few], columns._replace(first=count))
        self._bases = self.sent[0].clone()
        layout = (x.shape, x.stride()), (weight[:count].shape, weight.stride()), x.dtype, x.device
        stride, temperature = self._exponentials.stride(0), columns.scores.temperature
        kernel = _prepared(layout, stride, temperature, num_sms(x.device))
        sums = self.sent.new_empty(kernel.columns, x.shape[0])
        excess = self.sent.new_zeros(x.shape[0] + 1)
        rows = columns.targets, columns.start, self._bases, sums, self.sent[1], excess
        kernel.launch(x, weight[:count], rows, self._exponentials)
        exponential_rows.launch_join(sums, excess, self._bases, self.sent[0])

    def factors(self, terms: Tensor) -> tuple[Tensor, Tensor]:
        """(rows of x by their factors, the factors), by which what is in the blocks becomes gradients of logits."""
        from ....kernels.linear_cross_entropy import exponential_rows, triton_kernel

        given = self._bases, self.sent[1]
        scaled, factors, of_few = exponential_rows.launch_factors(
            self._x, self._columns, terms, given, self._exponentials
        )
        few = self._columns._replace(first=self._exponentials.shape[0])
        triton_kernel.launch_gradient(self._few, few, of_few, self._few)
        return scaled, factors


def multiply_rows_(x: Tensor, factors: Tensor) -> None:
    """x [M, H], which is contiguous."""
    from ....kernels.linear_cross_entropy.exponential_rows import launch_by_factor

    launch_by_factor(x, factors)


@lru_cache(_MOST_PREPARED)
def _prepared(layout: tuple[Any, ...], stride: int, temperature: float, sms: int) -> Any:
    """The launcher of operands that lie as ``layout`` says, in the current context."""
    from ....kernels.linear_cross_entropy.cuda_kernel import Exponentials

    *lies, dtype, _ = layout
    x, weight = (torch.empty_strided(*each, dtype=dtype, device="meta") for each in lies)
    return Exponentials(x, weight, stride, temperature, sms)
