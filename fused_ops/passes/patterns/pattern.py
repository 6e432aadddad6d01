"""What a collective and its neighbourhood can become: one class for all ops."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ....kernels.device.gemm.scaling import ScaledProducts
from ...dispatch import profitability
from ..agreement.signature import Order
from ..graph.collectives import Collective
from ..graph.index_map import plain
from ..graph.nodes import LeftAlone, val
from ..graph.sizes import Size, hint
from .one_product import copies_us, why_not_one_product
from .sum_of_matmuls import SumOfMatmuls

_EXCHANGES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


@dataclass(kw_only=True)
class Pattern:
    """One op of weft in the place of a collective and of what is computed around it.

    Attributes:
        collective: of several that the op takes the place of the first.
        others: the rest of these.
        op: what ``replace`` calls.
        form: what was found around the collective, in words.
        detail: what is to be said of the op, in words.
        sizes: m, n, k of the product that a rank computes; k is 0 where it computes none.
        dtype: what travels.
        order: what travels as digits of a tensor's indices, and the shape of that.
        replace: changes the graph. It raises LeftAlone where the op cannot be called with what is there, a size that
            depends on data for one; the graph is then as it was.
        dim: along which the op gathers or scatters; None where there is none.
        last_dim: whether that is the last one.
        decided: whether it is not weighed: it is profitable in any case, or that was settled when it was found.
        returns_A: whether the op returns what is gathered.
        transposes: whether what is gathered is the right operand: the op computes the transposed product.
        sum: the products that are reduced.
        scaled: how the operands of scaled products are scaled.
    """

    collective: Collective
    op: Any
    form: str
    detail: str
    sizes: tuple[Size, Size, Size]
    dtype: torch.dtype
    order: Order
    replace: Callable[[], None]
    others: tuple[fx.Node, ...] = ()
    dim: int | None = None
    last_dim: bool = False
    decided: bool = False
    returns_A: bool = False
    transposes: bool = False
    sum: SumOfMatmuls | None = None
    scaled: ScaledProducts | None = None

    @classmethod
    def of_tensor(cls, c: Collective, x: torch.Tensor, **given: Any) -> Pattern:
        """Of an op that sends a tensor as it is, and, unless ``sizes`` are given, computes no product."""
        sizes = given.pop("sizes", (math.prod(x.shape[:-1]), x.shape[-1], 0))
        return cls(collective=c, sizes=sizes, dtype=x.dtype, order=(plain(x.shape), tuple(x.shape)), **given)

    @property
    def problem(self) -> tuple[int, int, int] | None:
        """The sizes of the product, symbolic ones as they are now; None if one is not known before the run."""
        try:
            m, n, k = map(hint, self.sizes)
        except LeftAlone:
            return None
        return m, n, k

    @property
    def gain(self) -> float | None:
        """Microseconds that it should save, less those of left operands that it copies."""
        if (problem := self.problem) is None:
            return None
        copied = 0.0 if self.sum is None else copies_us(self.sum.products)
        return profitability.expected_gain(self._candidate(problem)) - copied

    def why_not_profitable(self) -> str | None:
        """Why it should not be fused, if that is to be weighed; None if it should."""
        if self.decided:
            return None
        problem = self.problem
        candidate = None if problem is None else self._candidate(problem)
        if self.sum is not None and (why := why_not_one_product(self.sum.products, candidate)) is not None:
            return why
        return None if candidate is None else profitability.why_not_profitable(candidate)

    def why_not_compared(self) -> str | None:
        """Why ranks cannot tell, before the run, whether they have the same shapes; None if they can. One size that
        depends on data is no reason: without the pass, too, all ranks send as many elements."""
        sent = free_unbacked_symbols(val(self.collective.x).numel())
        others = free_unbacked_symbols(self.sizes) - sent
        if len(sent) <= 1 and not others:
            return None
        names = ", ".join(sorted(map(str, sent | others)))
        return (
            f"the sizes {names} depend on data, so ranks cannot know beforehand whether theirs are the same"
        )

    def _candidate(self, problem: tuple[int, int, int]) -> profitability.FusionCandidate:
        return profitability.FusionCandidate(
            word_of(self.op),
            *problem,
            self.collective.world,
            self.dtype,
            val(self.collective.x).device.type,
            last_dim=self.last_dim,
            return_A=self.returns_A,
            scaled=self.scaled,
        )


def word_of(op: Any) -> str:
    """The word by which ``profitability`` knows an op: without a product that of what it exchanges."""
    name = str(op._schema.name).rpartition("::")[2]
    return name.removeprefix("fused_") if "matmul" in name else next(e for e in _EXCHANGES if e in name)


def why_not_called_from_cpp(op: Any) -> str | None:
    """Why the code that Inductor generates in C++ cannot call an op; None if it can, or is in Python."""
    if not inductor_config.cpp_wrapper or V.aot_compilation:
        return None
    if not any(isinstance(r.type, torch.ListType) for r in op._schema.returns):
        return None
    return f"the C++ wrapper cannot call an op that returns a list of tensors, as {op._schema.name} does"
