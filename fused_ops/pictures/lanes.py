"""What ran when, in lanes, and bytes over time below them: one drawing, as an SVG and as a part of a page."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .svg import box, framed, label, legend_html, legend_svg, path, stroke, swatch

Bar = tuple[str, str, float, float]  #: kind, name, begin, end in microseconds
_WIDTH, _LEFT, _RIGHT = 960, 140, 20  # of the SVG and of what is beside its lanes
_LANE, _HELD, _AXIS = 16, 70, 18  # heights
_ZOOMS = (1, 4, 16, 64)


@dataclass(frozen=True)
class Panel:
    """Lanes below a title.

    Attributes:
        title: words above them.
        lanes: the bars of each by its name; of two at one place the later one is seen.
        held: lines of bytes over time by their names, (time, bytes held from then on); the first is filled.
    """

    title: str
    lanes: Mapping[str, Sequence[Bar]] = field(default_factory=dict)
    held: Mapping[str, Sequence[tuple[float, int]]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        ends = [end for bars in self.lanes.values() for *_, end in bars]
        return max([*ends, *(line[-1][0] for line in self.held.values() if line)], default=0.0)


class _Row(NamedTuple):
    """``drawing``: attributes and content of an <svg> of any width."""

    words: str
    height: int
    drawing: str


def lanes_svg(title: str, panels: Sequence[Panel], colours: Mapping[str, str]) -> str:
    """The SVG of panels below each other, all of one scale.

    Args:
        colours: a class of ``STYLE`` for each kind of bars, in the legend's order.
    """
    parts, y = legend_svg(_marks(panels, colours), (10, 34), _WIDTH)
    y += 10
    for panel, rows in _drawn(panels, colours):
        if panel.title:
            parts.append(label(10, y + 12, panel.title, bold=True))
            y += 18
        for words, height, drawing in rows:
            place = f'x="{_LEFT}" y="{y:.6g}" width="{_WIDTH - _LEFT - _RIGHT}" height="{height}"'
            parts += [label(10, y + 12, words), f'<svg overflow="visible" {place} {drawing}</svg>']
            y += height + 4
        y += 10
    return framed(title, (_WIDTH, y), parts)


def lanes_html(title: str, panels: Sequence[Panel], colours: Mapping[str, str]) -> str:
    """The same as a part of a page (``page``), as wide as that is; time can be stretched."""
    parts = []
    for panel, rows in _drawn(panels, colours):
        parts.append(f"<h3>{html.escape(panel.title)}</h3>" if panel.title else "")
        for words, height, drawing in rows:
            parts.append(f"<div class=lane>{html.escape(words)}</div>" if words else "")
            parts.append(f'<svg width="100%" height="{height}" {drawing}</svg>')
    zooms = (
        f"<label><input type=radio name=zoom class=x{n}{' checked' * (n == 1)}>{n}x</label>" for n in _ZOOMS
    )
    return "\n".join(
        [
            f"<form class=lanes>{f'<h2>{html.escape(title)}</h2>' if title else ''}",
            legend_html(_marks(panels, colours)),
            f"<p class=legend>time {' '.join(zooms)}</p>",
            "<div class=scroll><div class=wide>",
            *filter(None, parts),
            "</div></div></form>",
        ]
    )


def _marks(panels: Sequence[Panel], colours: Mapping[str, str]) -> dict[str, str]:
    used = {kind for panel in panels for bars in panel.lanes.values() for kind, *_ in bars}
    marks = {kind: swatch(colour) for kind, colour in colours.items() if kind in used}
    for name, i in ((name, i) for panel in panels for i, name in enumerate(panel.held)):
        marks[f"bytes held {name}"] = stroke("ink", 1, "4 2") if i else swatch("blue filled")
    return marks


def _drawn(panels: Sequence[Panel], colours: Mapping[str, str]) -> Iterator[tuple[Panel, list[_Row]]]:
    longest = max((panel.end for panel in panels), default=0.0) or 1.0
    ticks = _ticks(longest)
    for panel in panels:
        rows = [_Row(name, _LANE, _lane(bars, longest, ticks, colours)) for name, bars in panel.lanes.items()]
        if panel.held:
            rows.append(_Row(_most(panel), _HELD, _steps(panel, longest, ticks)))
        yield panel, [*rows, _Row("", _AXIS, _axis(longest, ticks))]


def _ticks(longest: float) -> list[float]:
    """At most ten, at 1, 2 or 5 of a decade."""
    step = next(
        step * 10.0**decade
        for decade in range(-6, 12)
        for step in (1, 2, 5)
        if step * 10.0**decade * 10 >= longest
    )
    return [i * step for i in range(1 + int(longest / step))]


def _axis(longest: float, ticks: Sequence[float]) -> str:
    unit, scale = ("ms", 1e3) if longest >= 1e4 else ("us", 1.0)
    words = [f"{tick / scale:g}{f' {unit}' if tick == ticks[-1] else ''}" for tick in ticks]
    anchors = ["start" if not t else "end" if t > 0.96 * longest else "middle" for t in ticks]
    at = [label(f"{100 * t / longest:.4g}%", 12, w, a) for t, w, a in zip(ticks, words, anchors, strict=True)]
    return f">{''.join(at)}"


def _scaled(size: tuple[float, float], ticks: Sequence[float], inside: Sequence[str]) -> str:
    """In coordinates of time and of what is drawn over it."""
    width, height = size
    lines = path("".join(f"M{tick:.7g} 0V{height:.6g}" for tick in ticks), "grid", 0.6)
    view = f'viewBox="0 0 {width:.7g} {height:.6g}" preserveAspectRatio="none">'
    return "".join([view, box(0, 0, size, "pale"), lines, *inside])


def _lane(bars: Sequence[Bar], longest: float, ticks: Sequence[float], colours: Mapping[str, str]) -> str:
    inside = [
        box(begin, 0, (end - begin, 1), colours[kind], f"{name}: {end - begin:.1f} us, from {begin:.1f} us")
        for kind, name, begin, end in bars
    ]
    return _scaled((longest, 1), ticks, inside)


def _most(panel: Panel) -> str:
    return f"most {max((size for line in panel.held.values() for _, size in line), default=0) / 1e6:.4g} MB"


def _steps(panel: Panel, longest: float, ticks: Sequence[float]) -> str:
    highest = max((size for line in panel.held.values() for _, size in line), default=0) or 1
    drawn = []
    for i, line in enumerate(panel.held.values()):
        d = "".join(f"H{when:.7g}V{highest - size}" for when, size in line)
        d = f"M0 {highest}{d}H{line[-1][0] if line else 0:.7g}V{highest}"
        drawn.append(path(d, "ink", 1, "4 2") if i else path(f"{d}Z", "blue filled"))
    return _scaled((longest, highest), ticks, drawn)
