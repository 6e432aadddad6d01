"""Whether one op should compute several products: what then lies in memory at once, and what it copies.

Products that a graph computes one after the other may do so to need less memory: the parts of a vocabulary whose logits
are summed up one by one, say, or experts. One op for all of them has all that they give, or all that they multiply, at
the same time. It is taken where that is at most twice what the graph has there anyway, so that queries, keys and
values, say, stay together.

A size that depends on data counts as 1: what is compared has it on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import fx

from ...dispatch.profitability import FusionCandidate, expected_gain
from ..graph.nodes import between, is_val, memory, val, walk
from ..graph.sizes import hint, hint_or_one, known, nbytes
from .matmuls import Product

# Bytes per microsecond of a copy that transposes, measured on 2 H100: [7168, 4096] of 16 bits in 219 us.
_TRANSPOSED_BYTES_PER_US = 268e3


def together(at: fx.Node, products: Sequence[fx.Node]) -> int:
    """How many of the products, in the order of the graph, one op at ``at`` may compute."""
    early, largest = 0, 0
    for i, node in enumerate(products):
        own = _bytes(node)
        largest = max(largest, own)
        # The first two are at most twice the largest.
        if i > 1 and early > 2 * (largest + _made_and_used(at, node)):
            return i
        early += own
    return len(products)


def why_not_one_product(products: Sequence[Product], candidate: FusionCandidate | None) -> str | None:
    """Why products that are summed should not be computed as one by an op; None if they may. ``candidate``: the op's
    call; None where its sizes are not known before the run."""
    lefts = _sizes(p.left for p in products)
    at_once, largest = sum(lefts.values()), max(lefts.values())
    if len(lefts) > 2 and at_once > 2 * largest and at_once > 2 * (largest + _needed(products)):
        return (
            f"the {len(products)} products that it sums are computed one after the other, and one product would need "
            "at once what they multiply"
        )
    if candidate is None or not (us := copies_us(products)) or us <= (saved := expected_gain(candidate)):
        return None
    return f"an operand on the left does not lie in rows: to copy it takes {us:.0f} us, and fusing saves {saved:.0f} us"


def copies_us(products: Iterable[Product]) -> float:
    """Microseconds that an op takes to copy those left operands that do not lie in rows."""
    lefts = {p.left: val(p.left) for p in products}.values()
    copied = sum(nbytes(x) for x in lefts if x.device.type == "cuda" and not known(x.stride(-1) == 1))
    return copied / _TRANSPOSED_BYTES_PER_US


def _made_and_used(first: fx.Node, at: fx.Node) -> int:
    """Bytes of what is made from ``first`` on and used from ``at`` on."""
    made: dict[int, int] = {}
    older: set[int] = set()
    used: set[int] = set()
    for node in filter(is_val, (first, *between(first, at))):
        where = memory(node)
        if where not in made and where not in older:
            if any(is_val(a) and memory(a) == where for a in node.all_input_nodes):
                older.add(where)
            else:
                made[where] = _bytes(node)
        if any(not user < at for user in node.users):
            used.add(where)
    return sum(made[where] for where in used & made.keys())


def _needed(products: Sequence[Product]) -> int:
    """Bytes of what is there before the first of the products, and of which the other ones' operands are made."""
    first = min(p.node for p in products)
    lefts = (p.left for p in products if p.node is not first)
    made_of = walk(lefts, lambda n: () if n < first else n.all_input_nodes)
    return sum(_sizes(n for n in made_of if n < first and is_val(n)).values())


def _sizes(nodes: Iterable[fx.Node]) -> dict[int, int]:
    """Bytes of the memory that the nodes share or have to themselves."""
    return {memory(node): _bytes(node) for node in nodes}


def _bytes(node: fx.Node) -> int:
    """Of the memory that a node lies in, whether it is all of it or not."""
    tensor = val(node)
    size = tensor.untyped_storage().nbytes()
    if isinstance(size, int) or size.node.has_hint():
        return hint(size)
    return math.prod(map(hint_or_one, tensor.shape)) * tensor.dtype.itemsize
