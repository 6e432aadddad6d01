"""What became of the order of a graph, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from .picture import DrawnOrder, order_svg


@dataclass(frozen=True)
class Placed:
    """Where a collective that runs beside others was put.

    Attributes:
        node: its name in the graph.
        transport: what carries it.
        start, wait: past how many products, attentions and ops of weft either has moved; negative where it is
            earlier now.
        before, after: microseconds that the compute stream would wait for it, by the table of costs.
        why_start, why_wait: why either did not move further.
    """

    node: str
    transport: str
    start: int
    wait: int
    before: float
    after: float
    why_start: str
    why_wait: str

    def __str__(self) -> str:
        steps = [("start", self.start), ("wait", self.wait)]
        did = [
            f"{word} {abs(n)} kernel{'s' * (abs(n) > 1)} {'later' if n > 0 else 'earlier'}"
            for word, n in steps
            if n
        ]
        moved = ", ".join(did) or "stays"
        text = f"{self.node} ({self.transport}): {moved}, exposed {self.before:.3g} us -> {self.after:.3g} us"
        if self.after > 0:
            text += f"; its start: {self.why_start}; its wait: {self.why_wait}"
        return text


@dataclass(frozen=True)
class Bucket:
    """Collectives that one call starts.

    Attributes:
        node: its name in the graph.
        of: the names of those that it took the place of.
        size: bytes that they move: of the operands or of the results, whichever are larger.
    """

    node: str
    of: tuple[str, ...]
    size: int

    def __str__(self) -> str:
        return f"{self.node}: {len(self.of)} in a bucket of {self.size} bytes: {', '.join(self.of)}"


@dataclass(frozen=True)
class OrderChange:
    """What was moved in a graph.

    Attributes:
        graph: counts the graphs that the pass saw, from 0.
        placed: its collectives, in the order given.
        before, after: microseconds that the compute stream would wait for all of them.
        peak_before, peak_after: bytes of torch's memory that the graph makes and holds at once.
        crossed: groups whose collectives are in buckets, or have changed their order against others'.
        buckets: what was put into one call.
        drawn: what ``svg`` shows of the order before and after.
        measured: whether microseconds are by what ``measure_costs`` has measured; else by constants.
        kept: why the order given was kept; "" where it was changed.
    """

    graph: int
    placed: tuple[Placed, ...]
    before: float
    after: float
    peak_before: int
    peak_after: int
    kept: str = ""
    crossed: frozenset[str] = frozenset()
    buckets: tuple[Bucket, ...] = ()
    measured: bool = False
    drawn: tuple[DrawnOrder, DrawnOrder] = field(default=(DrawnOrder(), DrawnOrder()), repr=False)

    @property
    def moved(self) -> int:
        """How many collectives were moved."""
        return sum(bool(p.start or p.wait) for p in self.placed)

    def svg(self) -> str:
        """A picture of both orders, as predicted: lanes for compute and each transport, and memory under them.

        >>> from weft.fused_ops import FusionPass
        >>> for change in FusionPass(reorder=True).report().orders:
        ...     _ = open(f"order-{change.graph}.svg", "w").write(change.svg())

        Returns:
            an SVG as text; what a box is, it says under the pointer.
        """
        words = [
            f"{when}: exposed {us:.3g} us, peak {peak} bytes"
            for when, us, peak in [
                ("as given", self.before, self.peak_before),
                ("as it is now", self.after, self.peak_after),
            ]
        ]
        return order_svg(f"Order of graph {self.graph}", list(zip(words, self.drawn, strict=True)))

    def __str__(self) -> str:
        by = "predicted by measured costs" if self.measured else "predicted"
        head = f"graph {self.graph}: order kept: {self.kept}" if self.kept else f"graph {self.graph}: "
        if not self.kept:
            head += (
                f"{self.moved} of {len(self.placed)} collectives moved, exposed {self.before:.3g} us -> "
                f"{self.after:.3g} us, peak {self.peak_before} -> {self.peak_after} bytes "
                f"({by}; a picture: report().orders[i].svg())"
            )
        return "\n".join([head, *(f"    {each}" for each in (*self.buckets, *self.placed))])
