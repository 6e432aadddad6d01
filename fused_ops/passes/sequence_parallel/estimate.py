"""Whether a region on each rank's own rows should save time.

An all-reduce sends as much as a reduce-scatter and an all-gather. So what is saved is what these hide behind their
products more than that does, and the other ranks' rows of what lies between; what is lost are the time that an exchange
takes however little it sends, and gathers beyond one for each all-reduce.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import fx

from ...dispatch.profitability import (
    FusionCandidate,
    hidden_us,
    microseconds_to_multiply,
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
#: With it the estimate says of Llama's attention on 2 H100 what the sum of the measured ops does: not with 512 rows,
#: but with 2048 (bench/results/h100-x2-matmul_all_reduce.json and the others).
_MORE_LATENCY = 8.0
#: Of the products' time: what is less is not there. Two layers of Llama 8B's sizes took 2.4 % less on 2 H200 with 1024
#: rows, 1.1 % less with 4096 and 0.4 % more with 8192 (bench/results/h200-x2-sequence-layers.txt).
_LEAST_SHARE = 0.02


def why_not_faster(region: Region) -> str | None:
    """Why a region should stay as it is; None if it should not. A function of its sizes alone."""
    first = region.collectives[0]
    if val(first.x).device.type != "cuda":
        return None
    try:
        parts = [_of_reduction(c) for c in region.collectives]
        parts += [_of_gather(node, region) for node in region.gathered]
        size = hint(val(first.x).numel()) * val(first.x).dtype.itemsize
    except LeftAlone as e:
        return str(e)
    gain, least = sum(part.saved for part in parts), _LEAST_SHARE * sum(part.takes for part in parts)
    more = len(region.gathered) - len(region.collectives)
    gain -= more * microseconds_to_send("cuda", size * (first.world - 1) / first.world)
    gain += region.norms * _TIMES_OF_NORM * size / MEMORY * (first.world - 1) / first.world
    gain -= _MORE_LATENCY * len(region.collectives)
    return (
        None
        if gain > least
        else f"by the estimate it would save {gain:.3g} us, and less than {least:.3g} is none"
    )


class _Part(NamedTuple):
    """Microseconds that a product saves more on own rows, fused, and those that it takes."""

    saved: float
    takes: float


def _of_reduction(c: Collective) -> _Part:
    """Of a product in front of a reduction, with a reduce-scatter instead of the all-reduce.

    Raises:
        LeftAlone: it should not be fused with a reduce-scatter.
    """
    total = _products(c)
    if total is None:
        return _Part(0.0, 0.0)
    x = val(c.x)
    m, n, k = (hint(size) for size in (total.m, total.n, total.k))
    where = m, n, k, c.world, x.dtype, x.device.type
    scattered = FusionCandidate("matmul_reduce_scatter", *where)
    if (why := why_not_profitable(scattered)) is not None:
        raise LeftAlone(why)
    reduced = FusionCandidate("matmul_all_reduce", *where)
    fused = m * n * x.dtype.itemsize >= MATMUL_FROM and why_not_profitable(reduced) is None
    saved = hidden_us(scattered) - (hidden_us(reduced) if fused else 0.0)
    return _Part(saved, microseconds_to_multiply(x.device.type, m * n * k))


def _of_gather(node: fx.Node, region: Region) -> _Part:
    """Of products of what is gathered.

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
        return _Part(0.0, 0.0)
    m, k = hint(math.prod(tensor.shape[:-1])), hint(tensor.shape[-1])
    where = region.layout.world, tensor.dtype, tensor.device.type
    candidate = FusionCandidate("all_gather_matmul", m, columns, k, *where)
    if (why := why_not_profitable(candidate)) is not None:
        raise LeftAlone(why)
    return _Part(hidden_us(candidate), microseconds_to_multiply(tensor.device.type, m * columns * k))


def _products(c: Collective) -> SumOfMatmuls | None:
    try:
        return sum_of(c.x, plain(val(c.x).shape), c.node)
    except LeftAlone:
        return None
