"""What became of the order of a graph, for the report."""

from __future__ import annotations

from dataclasses import dataclass, field

from ...pictures.lanes import Bar, Panel, lanes_html, lanes_svg
from ...pictures.page import table_html
from .exposure import COMPUTE, Timeline

_COLOURS = {COMPUTE: "green", "weft": "blue", "copy engines": "ochre", "NVLink": "red", "network": "violet"}
_SAID = 4  # kernels that hide a collective, by name


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
        hidden_by: the kernels that run while it is on its way, and the microseconds of each in which both do.
    """

    node: str
    transport: str
    start: int
    wait: int
    before: float
    after: float
    why_start: str
    why_wait: str
    hidden_by: tuple[tuple[str, float], ...] = ()

    @property
    def moved(self) -> str:
        steps = [("start", self.start), ("wait", self.wait)]
        did = [
            f"{word} {abs(n)} kernel{'s' * (abs(n) > 1)} {'later' if n > 0 else 'earlier'}"
            for word, n in steps
            if n
        ]
        return ", ".join(did) or "stays"

    @property
    def hidden(self) -> str:
        """What hides it, those that hide the most first."""
        most = sorted(self.hidden_by, key=lambda kernel: -kernel[1])
        said = [f"{name} {us:.3g} us" for name, us in most[:_SAID]]
        if rest := most[_SAID:]:
            said.append(f"{len(rest)} more {sum(us for _, us in rest):.3g} us")
        return ", ".join(said)

    @property
    def why(self) -> str:
        """Why it is still exposed, if it is."""
        return f"its start: {self.why_start}; its wait: {self.why_wait}" if self.after > 0 else ""

    def __str__(self) -> str:
        exposed = f"exposed {self.before:.3g} us -> {self.after:.3g} us"
        hidden = f"hidden by {self.hidden}" if self.hidden_by else ""
        text = f"{self.node} ({self.transport}): {self.moved}, {exposed}"
        return "; ".join(filter(None, (text, hidden, self.why)))


@dataclass(frozen=True)
class OrderChange:
    """What was moved in a graph.

    Attributes:
        graph: counts the graphs that the pass saw, from 0.
        placed: its collectives, in the order given.
        before, after: microseconds that the compute stream would wait for all of them.
        peak_before, peak_after: bytes of torch's memory that the graph makes and holds at once.
        kept: why the order given was kept; "" where it was changed.
        crossed: groups whose collectives have changed their order against others'.
        drawn: what pictures show of the order before and after.
    """

    graph: int
    placed: tuple[Placed, ...]
    before: float
    after: float
    peak_before: int
    peak_after: int
    kept: str
    crossed: frozenset[str]
    drawn: tuple[Timeline, Timeline] = field(repr=False)

    @property
    def moved(self) -> int:
        """How many collectives were moved."""
        return sum(bool(p.start or p.wait) for p in self.placed)

    def svg(self) -> str:
        """A picture of both orders, as predicted: lanes for compute and each transport, and bytes held over time.

        >>> from weft.fused_ops import FusionPass
        >>> for change in FusionPass(reorder=True).report().orders:
        ...     _ = open(f"order-{change.graph}.svg", "w").write(change.svg())

        Returns:
            an SVG as text; what a box is, it says under the pointer.
        """
        return lanes_svg(self._title, self._panels(), self._colours())

    def html(self) -> str:
        """The same as a part of the report's page, with a table of what hides each collective; "" without kernels."""
        rows = [
            (p.node, p.transport, p.moved, p.hidden or "nothing", f"{p.before:.3g}", f"{p.after:.3g}", p.why)
            for p in self.placed
        ]
        if not any(drawn.spans for drawn in self.drawn):
            return ""
        microseconds = "exposed as given, us", "exposed now, us"
        head = "collective", "by", "moved", "hidden by", *microseconds, "why still exposed"
        table = table_html(head, rows, microseconds) if rows else ""
        return lanes_html(self._title, self._panels(), self._colours()) + table

    @property
    def _title(self) -> str:
        return f"Order of graph {self.graph}, predicted" + (f"; kept: {self.kept}" if self.kept else "")

    def _panels(self) -> list[Panel]:
        both = ("as given", self.before, self.peak_before), ("as it is now", self.after, self.peak_after)
        words = [f"{when}: exposed {us:.3g} us, peak {peak / 1e6:.4g} MB" for when, us, peak in both]
        used = {lane for drawn in self.drawn for lane, *_ in drawn.spans}
        orders = []
        given, now = self.drawn
        for title, drawn in list(zip(words, self.drawn, strict=True))[given == now :]:
            lanes: dict[str, list[Bar]] = {lane: [] for lane in self._colours() if lane in used}
            for span in drawn.spans:
                lanes[span[0]].append(span)
            orders.append(Panel(title, lanes))
        held = {"as it is now": now.memory} | ({} if given == now else {"as given": given.memory})
        return [*orders, Panel("torch's memory", held=held)]

    def _colours(self) -> dict[str, str]:
        others = {lane for drawn in self.drawn for lane, *_ in drawn.spans} - _COLOURS.keys()
        return {**_COLOURS, **dict.fromkeys(sorted(others), "grey")}

    def __str__(self) -> str:
        head = f"graph {self.graph}: order kept: {self.kept}" if self.kept else f"graph {self.graph}: "
        if not self.kept:
            head += (
                f"{self.moved} of {len(self.placed)} collectives moved, exposed {self.before:.3g} us -> "
                f"{self.after:.3g} us, peak {self.peak_before} -> {self.peak_after} bytes "
                f"(predicted; a picture: report().orders[i].svg())"
            )
        return "\n".join([head, *(f"    {each}" for each in self.placed)])
