"""Whether a region on each rank's own rows should save time.

An all-reduce sends as much as a reduce-scatter and an all-gather. So what is saved is what these hide behind their
products more than that does, and the other ranks' rows of what lies between; what is lost are the time that an exchange
takes however little it sends, and gathers beyond one for each all-reduce.
"""

from __future__ import annotations

import math

from torch import fx

from ...dispatch.profitability import (
    FusionCandidate,
    expected_gain,
    microseconds_to_send,
    why_not_profitable,
)
from ..graph.collectives import Collective, LeftAlone, hint, val
from ..graph.index_map import plain
from ..graph.views import view_step
from ..patterns.all_reduce import MATMUL_FROM, MEMORY
from ..patterns.matmuls import product
from ..patterns.sum_of_matmuls import SumOfMatmuls, sum_of
from .region import Region

#: How often a norm and an addition in front of it read or write as much as the tensor.
_TIMES_OF_NORM = 4
#: Microseconds that two exchanges and a norm of its own take more than one with the norm in it, whatever is sent.
#: With it the estimate says for Llama 8B and 70B on 2 H100 what the sum of the measured ops does: from 2048 and 1024
#: rows on (bench/results/h100-x2-matmul_all_reduce.json and the others).
_MORE_LATENCY = 8.0


def why_not_faster(region: Region) -> str | None:
    """Why a region should stay as it is; None if it should not. A function of its sizes alone."""
    first = region.collectives[0]
    if val(first.x).device.type != "cuda":
        return None
    try:
        gain = 0.0
        for c in region.collectives:
            gain += _of_reduction(c, region)
        for node in region.gathered:
            gain += _of_gather(node, region)
        size = hint(val(first.x).numel()) * val(first.x).dtype.itemsize
    except LeftAlone as e:
        return str(e)
    more = len(region.gathered) - len(region.collectives)
    gain -= more * microseconds_to_send("cuda", size * (first.world - 1) / first.world)
    gain += region.norms * _TIMES_OF_NORM * size / MEMORY * (first.world - 1) / first.world
    gain -= _MORE_LATENCY * len(region.collectives)
    return None if gain > 0 else f"by the estimate it would take {-gain:.3g} us longer"


def _of_reduction(c: Collective, region: Region) -> float:
    """Microseconds that a product in front saves more with a reduce-scatter than with the all-reduce.

    Raises:
        LeftAlone: it should not be fused with a reduce-scatter.
    """
    total = _products(c)
    if total is None:
        return 0.0
    x = val(c.x)
    m, n, k = (hint(size) for size in (total.m, total.n, total.k))
    where = m, n, k, c.world, x.dtype, x.device.type
    scattered = FusionCandidate("matmul_reduce_scatter", *where)
    if (why := why_not_profitable(scattered)) is not None:
        raise LeftAlone(why)
    reduced = FusionCandidate("matmul_all_reduce", *where)
    fused = m * n * x.dtype.itemsize >= MATMUL_FROM and why_not_profitable(reduced) is None
    return expected_gain(scattered) - (expected_gain(reduced) if fused else 0.0)


def _of_gather(node: fx.Node, region: Region) -> float:
    """Microseconds that products of what is gathered save.

    Raises:
        LeftAlone: it should not be fused with these.
    """
    columns, tensor = 0, val(node)
    pending = [node]
    while pending:
        source = pending.pop()
        for user in source.users:
            if user in region.leads:
                continue
            if (taken := product(user)) is not None and taken.left is source:
                columns += hint(val(taken.right).shape[-1])
            elif (step := view_step(user)) is not None and step.source is source:
                pending.append(user)
    if not columns:
        return 0.0
    m, k = hint(math.prod(tensor.shape[:-1])), hint(tensor.shape[-1])
    where = region.layout.world, tensor.dtype, tensor.device.type
    candidate = FusionCandidate("all_gather_matmul", m, columns, k, *where)
    if (why := why_not_profitable(candidate)) is not None:
        raise LeftAlone(why)
    return expected_gain(candidate)


def _products(c: Collective) -> SumOfMatmuls | None:
    try:
        return sum_of(c.x, plain(val(c.x).shape), c.node)
    except LeftAlone:
        return None
