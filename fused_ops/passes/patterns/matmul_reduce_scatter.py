"""Matrix products, summed, then reduce_scatter.

Whatever reshapes, permutes, casts, multiplies by a number, or cuts it into parts and joins them stands between, each
rank gets either rows of the product or columns that stand side by side: both are ``fused_matmul_reduce_scatter``, whose
result is then multiplied, reshaped, permuted and cast. A sum of products is one product. A vector added to each row is
summed by an all-reduce of its own: it is the same for all rows.

Products cast up to float32 before they are reduced travel as they are, which is half the bytes, and are summed to a
float32 result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ....kernels.matmul_reduce_scatter.configs import MOST_PRODUCTS
from ...library import schema
from ..graph import rewrite
from ..graph.collectives import Collective, LeftAlone, Size, check_no_write, known, some, val
from ..graph.index_map import Dims, around_rank, gathered_dims, numel, plain
from .candidate import gain_without_copies, problem_of, why_copied
from .epilogue import Terms, stays_behind
from .peak_memory import why_apart
from .sum_of_matmuls import SumOfMatmuls, sum_of


@dataclass
class MatmulReduceScatterPattern:
    """``part`` are the dimensions of what the op gives, this rank's part of ``sum``, to which it adds ``terms``."""

    collective: Collective
    sum: SumOfMatmuls
    dim: int  # of A @ B, where the op scatters it
    part: Dims
    terms: Terms
    stays: str  # what follows and is no part of the op

    op = schema.matmul_reduce_scatter
    others = ()

    @property
    def last_dim(self) -> bool:
        return self.dim == len(self.part) - 1

    @property
    def order(self) -> tuple[Dims, tuple[Size, ...]]:
        return (self.sum.rows, self.sum.columns), tuple(val(self.collective.wait).shape)

    @property
    def form(self) -> str:
        cast = " → cast" if self.sum.dtype != val(self.collective.x).dtype else ""
        where = " of columns" if self.last_dim else ""
        return f"{self.sum.form}{cast} → reduce_scatter{where}" + " → add" * len(self.terms.added)

    @property
    def detail(self) -> str:
        return ", ".join(t for t in (self.sum.detail, self.terms.detail, self.stays) if t)

    @property
    def adds(self) -> tuple[str, ...]:
        return ("one_shot_all_reduce",) * len(self.sum.vectors)

    @property
    def apart(self) -> str | None:
        """Why its products should not be computed as one, or not by an op."""
        if (why := why_apart(self.sum.products)) is not None:
            return why
        problem = problem_of(self)
        if problem is None:
            return None
        return why_copied(self.sum.products, lambda: gain_without_copies(self, problem))

    @property
    def dtype(self) -> torch.dtype:
        return self.sum.dtype

    @property
    def m(self) -> Size:
        return self.sum.m

    @property
    def n(self) -> Size:
        return self.sum.n

    @property
    def k(self) -> Size:
        return self.sum.k

    @classmethod
    def from_collective(cls, c: Collective) -> MatmulReduceScatterPattern:
        """
        Raises:
            LeftAlone: what is reduced is not exactly a product that the op computes.
        """
        rows = val(c.x).shape[0]
        if known(rows != c.world * val(c.wait).shape[0]):
            raise LeftAlone(f"its input has {rows} rows, no multiple of {c.world} ranks")
        total = sum_of(c.x, gathered_dims(val(c.wait).shape, c.world), c.node)
        if (around := around_rank(total.rows, c.world)) is not None:
            before, after = around
            part = (before, after, total.columns) if before else (after, total.columns)
            dim = int(bool(before))
        else:
            before, after = around_rank(total.columns, c.world) or ((), ())
            if before:
                raise LeftAlone("each rank gets columns of the product that do not stand side by side")
            if total.vectors:
                raise LeftAlone(f"{some(total.vectors)} is added, and each rank gets other columns of it")
            part, dim = (total.rows, after), 1
        check_no_write(total.first(), c.node)
        plain_sum = not total.vectors and total.factor == 1 and total.dtype == val(c.wait).dtype
        terms = Terms.after(c, part) if plain_sum else Terms(c.node)
        return cls(c, total, dim, part, terms, stays_behind(terms.path[-1] if terms.path else c.wait))

    @property
    def _adds_products(self) -> bool:
        """Whether the op is given each product's factors: its kernel of 16 bits needs no copy of them side by side."""
        return self.dtype.itemsize == 2 and len(self.sum.products) <= MOST_PRODUCTS

    def replace(self) -> None:
        """
        Raises:
            LeftAlone: a size is not there where it is needed. The graph is as it was.
        """
        c, at = self.collective, self.terms.at
        with rewrite.undone_if_left():
            pairs = self.sum.pairs(at) if self._adds_products else [self.sum.operands(at)]
            near = [*(A for A, _ in pairs), *(p.left for p in self.sum.products)]
            if len(self.part) > 2:
                lead = [numel(self.part[0]), c.world * numel(self.part[1])]
                pairs = [(rewrite.reshape(A, [*lead, val(A).shape[-1]], at, near), B) for A, B in pairs]
            (A, B), *others = pairs
            want = val(c.wait).dtype
            named: dict[str, Any] = {"out_dtype": want} if want != self.sum.dtype else {}
            if others:
                named["more"] = [factor for pair in others for factor in pair]
            named |= self.terms.arguments(self.part, [A, B])
            out = rewrite.fused(at, self.op, c, A, B, c.reduce_op, self.dim, **named)
            out = self.sum.finished(out, c, at)
            out = rewrite.rearrange(out, self.part, plain(val(c.wait).shape), val(c.wait).shape, at, near)
            out = rewrite.make_contiguous(out, at)
        self.terms.replace()
        rewrite.replace_result(c, out)
        rewrite.erase_unused([*self.terms.added, *self.terms.path, *self.sum.nodes, c.node, c.wait])
