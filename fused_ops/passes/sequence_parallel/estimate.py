"""Whether a region on each rank's own rows should save time.

Compared is what the ops take as the graph is, products and norms beside them, and as it would be: by the models with
which these ops' calls are planned. Attention and what else stays as it is counts for nothing.
"""

from __future__ import annotations

import math
from dataclasses import replace

from torch import fx

from ....kernels.device.device_spec import H200
from ....kernels.device.gemm.gemm_tiles import product_us, streamed_us
from ...dispatch.profitability import (
    FusionCandidate,
    hidden_us,
    microseconds_to_multiply,
    predicted_us,
    why_not_profitable,
)
from ..graph.collectives import Collective
from ..graph.index_map import plain
from ..graph.nodes import LeftAlone, val
from ..graph.sizes import hint, nbytes
from ..graph.views import view_step
from ..order.costs import alone_us
from ..patterns.all_reduce import MATMUL_FROM
from ..patterns.matmuls import product
from ..patterns.sum_of_matmuls import sum_of
from .region import Region

#: How often a norm and an addition before it read or write as much as the tensor; microseconds of their launch.
_TIMES_OF_NORM, _LAUNCH = 4, 2.0
#: Of the products' time: what is less may not be there. Two layers of Llama 8B's sizes on 2 H200 took 24 us less with
#: 1024 rows and 43 and 167 us less with 4096, where 47 and 105 are estimated, 7 and 3.9 %. With 8192 they took 37 us
#: more, and 177 less are estimated, 3.3 %: long products run into the limit of power
#: (bench/results/h200-x2-sequence-layers.txt).
_LEAST_SHARE = 0.035
#: Times the bytes of the all-reduces that a region may send: a number of each row may be gathered, too.
_MOST_BYTES = 1.05


def why_more_bytes(region: Region) -> str | None:
    """Why a region should stay for what it would send, per rank; None if it need not.

    An all-reduce sends as much as a reduce-scatter and an all-gather of the same tensor. More is sent where rows are
    gathered that the graph had on all ranks, as for a backward that is not computed by rows. Sums of rows do not count:
    each is one row.
    """
    try:
        reduced = sum(nbytes(val(c.x)) for c in region.collectives)
        sent = reduced + sum(nbytes(val(n)) for n in region.gathered)
    except LeftAlone:
        return None  # sizes that only the run knows
    if sent <= _MOST_BYTES * 2 * reduced:
        return None
    return f"it would send {sent / (2 * reduced):.3g} times the bytes{region.unlike}"


def why_not_faster(region: Region) -> str | None:
    """Why a region should stay as it is; None if it should not. A function of its sizes alone."""
    first = region.collectives[0]
    if val(first.x).device.type != "cuda":
        return None
    try:
        saved, multiplied = _saved(region)
    except LeftAlone as e:
        return str(e)
    least = _LEAST_SHARE * multiplied
    if saved > least:
        return None
    return f"by the estimate it would save {saved:.3g} us, and less than {least:.3g} is none"


def _saved(region: Region) -> tuple[float, float]:
    """Microseconds that own rows save, and those of the region's products. LeftAlone: a product should not be fused
    with what it would get."""
    first = region.collectives[0]
    size, norms = nbytes(val(first.x)), region.norms
    saved = multiplied = 0.0
    for c in region.collectives:
        sum_only, scattered = _of_reduction(c)
        alone = sum_only.k == 0
        reduced = _us(sum_only)
        if norms and sum_only.op == "all_reduce":  # takes the norm along
            normed = predicted_us(replace(sum_only, op="all_reduce_rms_norm", k=0), H200)
            reduced += 0.0 if normed is None else normed - alone_us(sum_only)
            norms -= normed is not None
        saved += reduced - _us(scattered)
        multiplied += 0.0 if alone else _product_us(sum_only)
    saved += norms * _norm_us(size) - region.norms * _norm_us(size / first.world)
    for node in region.gathered:
        gathered = _of_gather(node, region)
        multiplying = _product_us(gathered) if gathered.k else 0.0
        saved += multiplying - _us(gathered)
        multiplied += multiplying
    return saved, multiplied


def _norm_us(size: float) -> float:
    return _LAUNCH + streamed_us(int(_TIMES_OF_NORM * size), 1, H200)


def _us(candidate: FusionCandidate) -> float:
    """Microseconds of an op; of an all_reduce of a product also of the product, which stays before it."""
    if candidate.op == "all_reduce" and candidate.k:
        return _product_us(candidate) + alone_us(candidate)
    us = predicted_us(candidate, H200)
    # Of float32 there is no model but that of what is hidden.
    return _product_us(candidate) + alone_us(candidate) - hidden_us(candidate) if us is None else us


def _product_us(candidate: FusionCandidate) -> float:
    c = candidate
    if c.dtype.itemsize != 2:
        return microseconds_to_multiply(c.device_type, c.m * c.n * c.k)
    return product_us(c.m, c.n, c.k, c.world_size, H200)


def _of_reduction(c: Collective) -> tuple[FusionCandidate, FusionCandidate]:
    """What a reduction is, with the product before it, if there is one: as the graph is, and on own rows. LeftAlone: it
    should not be fused with a reduce-scatter."""
    x = val(c.x)
    where = c.world, x.dtype, x.device.type
    try:
        total = sum_of(c.x, plain(x.shape), c.node)
    except LeftAlone:
        n = hint(x.shape[-1])
        reduced = FusionCandidate("all_reduce", hint(x.numel()) // max(n, 1), n, 0, *where)
        return reduced, replace(reduced, op="reduce_scatter")
    m, n, k = (hint(size) for size in (total.m, total.n, total.k))
    scattered = FusionCandidate("matmul_reduce_scatter", m, n, k, *where)
    if (why := why_not_profitable(scattered)) is not None:
        raise LeftAlone(why)
    reduced = replace(scattered, op="matmul_all_reduce")
    fused = m * n * x.dtype.itemsize >= MATMUL_FROM and why_not_profitable(reduced) is None
    return reduced if fused else replace(reduced, op="all_reduce"), scattered


def _of_gather(node: fx.Node, region: Region) -> FusionCandidate:
    """The products of what is gathered, and its gather; the gather alone if there are none. LeftAlone: it should not be
    fused with these."""
    columns, tensor, kept = 0, val(node), False
    pending = [node]
    while pending:
        source = pending.pop()
        for user in region.all_rows(source):
            if (taken := product(user)) is not None and taken.left is source:
                columns += hint(val(taken.right).shape[-1])
            elif (step := view_step(user)) is not None and step.source is source:
                pending.append(user)
            else:
                kept = True
    m, k = hint(math.prod(tensor.shape[:-1])), hint(tensor.shape[-1])
    where = region.layout.world, tensor.dtype, tensor.device.type
    if not columns:
        return FusionCandidate("all_gather", m, k, 0, *where)
    candidate = FusionCandidate("all_gather_matmul", m, columns, k, *where, return_A=kept)
    if (why := why_not_profitable(candidate)) is not None:
        raise LeftAlone(why)
    return candidate
