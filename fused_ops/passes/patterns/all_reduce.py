"""all_reduce, mostly of matrix products: what row-parallel layers without sequence parallelism do.

It becomes, by size, ``one_shot_all_reduce``, ``fused_matmul_all_reduce`` of a product, or, with the residual and the
norm that follow, ``fused_all_reduce_rms_norm`` or ``fused_all_reduce_layer_norm``. So is what reduces something else
than products, such as an embedding, unless it is alone and something runs while it is on its way; and what is reduced
by max or min, whatever it is of. What experts' outputs add up to becomes ``fused_moe_combine_all_reduce``, with or
without residual and norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import fx

from ...dispatch.profitability import FusionCandidate, gain_of_joining, why_not_profitable
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.index_map import plain
from ..graph.nodes import LeftAlone, c10d, val, what
from ..graph.rewrite import fused, make_contiguous, put_in_place, rearrange, reshape, undone_if_left
from ..graph.sizes import Size, hint, nbytes
from ..norms.following import FollowingNorm
from .epilogue import stays_after
from .experts import ExpertsSum, experts_sum
from .one_product import why_not_one_product
from .pattern import Pattern
from .sum_of_matmuls import SumOfMatmuls, has_product, sum_of, why_no_product
from .summed_all_reduces import MERGED

MEMORY = 3e6  #: bytes that a GPU reads or writes in a microsecond
MATMUL_FROM = 1 << 20  #: bytes: what takes longer to send than to start is worth overlapping with the product


def match_all_reduce(c: Collective, *, always: bool = False) -> Pattern:
    """``always``: into the product where that is right, else in one shot, whether it pays or not. LeftAlone: no op of
    weft is faster, or the result is waited for later."""
    if val(c.x).dim() == 0 and c.sums:
        raise LeftAlone("its input is a number")
    found = _Replacement(c, c.node.meta.get(MERGED, ()), of_products=c.sums and has_product(c.x))
    if not found.of_products and not found.merged and (later := c.beside) is not None:
        of = why_no_product(c.x) if c.sums else f"it reduces by {c.reduce_op!r}"
        raise LeftAlone(
            f"{of}; and it is waited for after {what(later)}, which the group's own backend overlaps with it"
        )
    try:
        found.choose(always)
    except LeftAlone:
        if not found.merged:
            raise
        # Neither op pays, but one all-reduce instead of several does.
        found.op = c10d.all_reduce.default
    if c.sums and found.norm is None and not found.stays:
        found.stays = stays_after(c.wait)
    return found.pattern()


@dataclass
class _Replacement:
    """``merged``: the all-reduces whose operands were added to that of the collective."""

    collective: Collective
    merged: tuple[fx.Node, ...]
    of_products: bool
    op: Any = schema.all_reduce
    sum: SumOfMatmuls | None = None  # of products, where the op computes them
    norm: FollowingNorm | None = None
    experts: ExpertsSum | None = None  # whose outputs the op puts together
    stays: str = ""  # what becomes of a norm that is not fused, or of another step after it
    before: str = ""  # why experts' outputs are put together before it

    def pattern(self) -> Pattern:
        c, total, count = self.collective, self.sum, 1 + len(self.merged)
        x = val(c.x)
        product = f"{'product' if total is None else total.form} → "
        product *= self.of_products and self.experts is None
        form = f"{product}all_reduce" + f" by {c.reduce_op}" * (not c.sums)
        form = form if count == 1 else f"{count} all_reduces{' of products' * self.of_products} → add"
        form = f"experts → {form}" if self.experts is not None else form
        merged = f"{count} all-reduces as one" * (count > 1)
        norm = self.stays if self.norm is None else self.norm.detail
        experts = self.before if self.experts is None else self.experts.detail
        return Pattern(
            collective=c,
            op=self.op,
            form=form + (self.norm.form if self.norm is not None else ""),
            detail=", ".join(t for t in ("" if total is None else total.detail, experts, merged, norm) if t),
            sizes=self._sizes,
            dtype=x.dtype,
            order=(plain(x.shape) if total is None else (total.rows, total.columns), tuple(x.shape)),
            replace=self.replace,
            others=self.merged,
            decided=True,
            sum=total,
        )

    @property
    def _sizes(self) -> tuple[Size, Size, Size]:
        if self.sum is not None:
            return self.sum.m, self.sum.n, self.sum.k
        shape = val(self.collective.x).shape
        return math.prod(shape[:-1]), next(reversed(shape), 1), 0

    def choose(self, always: bool) -> None:
        """LeftAlone: no op pays."""
        x = val(self.collective.x)
        reasons = []
        norm = self._norm()
        if self.of_products and (always or nbytes(x) >= MATMUL_FROM):
            try:
                self.sum = self._products()
                if not always:
                    candidate = self._check_profitable("matmul_all_reduce")
                    if (why := why_not_joined(self.sum, candidate)) is not None:
                        raise LeftAlone(why)
                    if (why := why_not_one_product(self.sum.products, candidate)) is not None:
                        raise LeftAlone(why)
                self.op = schema.matmul_all_reduce
                if norm is not None:
                    self.stays = "the norm after it stays: the all-reduce is fused with its product instead"
                return
            except LeftAlone as e:
                self.sum = None
                reasons.append(str(e))
        try:
            if not always:
                self._check_profitable("all_reduce")
        except LeftAlone as e:
            raise LeftAlone("; ".join([*reasons, str(e)])) from e
        if norm is not None:
            self.norm, self.op = norm, norm.op
        self._put_experts_together()

    def _put_experts_together(self) -> None:
        """By the op, if it can; else it is noted why not."""
        c, norm = self.collective, self.norm
        if c.reduce_op != "sum":
            return
        try:
            if (experts := experts_sum(c.x)) is None:
                return
            if norm is not None and norm.op is not schema.all_reduce_rms_norm:
                raise LeftAlone(f"no op has them and {norm.op._schema.name}")
            at = c.node if norm is None else norm.sum.at
            experts.check(c.x, at, c.world, norm=norm is not None)
        except LeftAlone as e:
            self.before = f"experts' outputs are combined before it: {e}"
            return
        self.experts = experts
        self.op = schema.moe_combine_all_reduce if norm is None else schema.moe_combine_all_reduce_rms_norm

    def _norm(self) -> FollowingNorm | None:
        """The norm that follows, if the op computes it; else it is noted why not."""
        if not self.collective.sums:
            return None
        try:
            return FollowingNorm.after(self.collective)
        except LeftAlone as e:
            self.stays = f"the norm after it stays: {e}"
            return None

    def _check_profitable(self, op: str) -> FusionCandidate:
        """LeftAlone: it is not."""
        c, x = self.collective, val(self.collective.x)
        m, n, k = map(hint, self._sizes)
        candidate = FusionCandidate(op, m, n, k, c.world, x.dtype, x.device.type)
        if (reason := why_not_profitable(candidate)) is not None:
            raise LeftAlone(reason)
        return candidate

    def _products(self) -> SumOfMatmuls:
        """What is summed up, as one product."""
        c = self.collective
        total = sum_of(c.x, plain(val(c.x).shape), c.node)
        if total.dtype != val(c.x).dtype:
            raise LeftAlone(f"the product is cast before it is reduced, and the op returns {total.dtype}")
        check_no_write(total.first(), c.node)
        return total

    def replace(self) -> None:
        c = self.collective
        if self.op is c10d.all_reduce.default:
            return
        with undone_if_left():
            if self.norm is None:
                new = {c.wait: self._reduced()}
            elif self.experts is None:
                new = self.norm.replaced(c, self.op, [c.x])
            else:
                *given, shared = self.experts.operands(self.norm.sum.at)
                new = self.norm.replaced(c, self.op, given, self.experts.rows, shared=shared)
        parts = [part for part in (self.norm, self.experts, self.sum) if part is not None]
        put_in_place(new, [c.node, c.wait, *(n for part in parts for n in part.nodes)])

    def _reduced(self) -> fx.Node:
        """The sum of all ranks, before the collective."""
        c, at, shape = self.collective, self.collective.node, val(self.collective.wait).shape
        if self.sum is not None:
            A, B = self.sum.operands(at)
            out = self.sum.finished(fused(at, self.op, c, A, B, c.reduce_op), c, at)
            out = rearrange(out, (self.sum.rows, self.sum.columns), plain(shape), shape, at, [A])
        elif self.experts is not None:
            *given, shared = self.experts.operands(at)
            return reshape(fused(at, self.op, c, *given, shared=shared), shape, at)
        else:
            out = fused(at, self.op, c, c.x, c.reduce_op)
        return make_contiguous(out, at)


def why_not_joined(total: SumOfMatmuls, candidate: FusionCandidate) -> str | None:
    """Why the weights of several products should not be copied to stand side by side; None if they should. Few rows are
    reduced in less time than that takes: of LoRA's two products, say."""
    if candidate.device_type != "cuda" or len(total.products) == 1:
        return None
    weights = [val(p.right) for p in total.products]
    copied = 2 * sum(map(nbytes, weights)) / MEMORY
    gain = gain_of_joining(candidate, [hint(w.shape[-2]) for w in weights])
    if copied <= gain:
        return None
    return f"to copy its {len(weights)} weights side by side takes {copied:.3g} us, and fusing saves {gain:.3g} us"
