"""Matrix products, summed, then reduce_scatter.

Whatever reshapes, permutes, casts, multiplies by a number, or cuts it into parts and joins them stands between, each
rank gets either rows of the product or columns that stand side by side: both are ``fused_matmul_reduce_scatter``, whose
result is then multiplied, reshaped, permuted and cast. A sum of products is one product. A vector added to each row is
summed by an all-reduce of its own: it is the same for all rows.

Products cast up to float32 before they are reduced travel as they are, which is half the bytes, and are summed to a
float32 result.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from ....kernels.matmul_reduce_scatter.configs import MOST_PRODUCTS
from ...library import schema
from ..graph.collectives import Collective
from ..graph.effects import check_no_write
from ..graph.index_map import Digits, Dims, gathered_dims, numel, part_of_rank, plain
from ..graph.nodes import LeftAlone, some, val
from ..graph.rewrite import fused, make_contiguous, put_in_place, rearrange, reshape, undone_if_left
from ..graph.sizes import known
from .epilogue import Terms, stays_after
from .pattern import Pattern
from .sum_of_matmuls import SumOfMatmuls, sum_of


def match_matmul_reduce_scatter(c: Collective) -> Pattern:
    """LeftAlone: what is reduced is not exactly a product that the op computes."""
    total = sum_of(c.x, parts_of_input(c), c.node)
    part, dim = scattered_part(c, total.rows, total.columns)
    of_columns = dim == len(part) - 1
    if of_columns and total.vectors:
        raise LeftAlone(f"{some(total.vectors)} is added, and each rank gets other columns of it")
    check_no_write(total.first(), c.node)
    plain_sum = not total.vectors and total.factor == 1 and total.dtype == val(c.wait).dtype
    terms = Terms.after(c, part) if plain_sum else Terms(c.node)
    stays = stays_after(terms.path[-1] if terms.path else c.wait)
    cast = " → cast" if total.dtype != val(c.x).dtype else ""
    added = " → add" * len(terms.added)
    return Pattern(
        collective=c,
        op=schema.matmul_reduce_scatter,
        form=f"{total.form}{cast} → reduce_scatter{' of columns' * of_columns}{added}",
        detail=", ".join(t for t in (total.detail, terms.detail, stays) if t),
        sizes=(total.m, total.n, total.k),
        dtype=total.dtype,
        order=((total.rows, total.columns), tuple(val(c.wait).shape)),
        replace=partial(_replace, c, total, dim, part, terms),
        dim=dim,
        last_dim=of_columns,
        sum=total,
    )


def parts_of_input(c: Collective) -> Dims:
    """The dimensions of what a reduce-scatter sums up, as digits of those of its result and the rank. LeftAlone: the
    ranks' parts are not equal."""
    rows = val(c.x).shape[0]
    if known(rows != c.world * val(c.wait).shape[0]):
        raise LeftAlone(f"its input has {rows} rows, no multiple of {c.world} ranks")
    return gathered_dims(val(c.wait).shape, c.world)


def scattered_part(c: Collective, rows: Digits, columns: Digits) -> tuple[Dims, int]:
    """The dimensions of a rank's part of a product, and along which the op scatters it. LeftAlone: the op has none for
    that."""
    if (found := part_of_rank(rows, columns, c.world)) is None:
        raise LeftAlone("each rank gets columns of the product that do not stand side by side")
    return found


def _replace(c: Collective, total: SumOfMatmuls, dim: int, part: Dims, terms: Terms) -> None:
    """``part`` are the dimensions of what the op gives, this rank's part of ``total``, to which it adds ``terms``."""
    at = terms.at
    # The kernel of 16 bits is given each product's factors, and needs no copy of them side by side.
    apart = total.dtype.itemsize == 2 and len(total.products) <= MOST_PRODUCTS
    with undone_if_left():
        pairs = total.pairs(at) if apart else [total.operands(at)]
        near = [*(A for A, _ in pairs), *(p.left for p in total.products)]
        if len(part) > 2:
            lead = [numel(part[0]), c.world * numel(part[1])]
            pairs = [(reshape(A, [*lead, val(A).shape[-1]], at, near), B) for A, B in pairs]
        (A, B), *others = pairs
        want = val(c.wait).dtype
        named: dict[str, Any] = {"out_dtype": want} if want != total.dtype else {}
        if others:
            named["more"] = [factor for pair in others for factor in pair]
        named |= terms.arguments(part, [A, B])
        out = fused(at, schema.matmul_reduce_scatter, c, A, B, c.reduce_op, dim, **named)
        out = total.finished(out, c, at)
        out = rearrange(out, part, plain(val(c.wait).shape), val(c.wait).shape, at, near)
        out = make_contiguous(out, at)
    terms.replace()
    put_in_place({c.wait: out}, [*terms.added, *terms.path, *total.nodes, c.node, c.wait])
