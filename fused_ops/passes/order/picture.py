"""A picture of a graph's order as it was and as it is: lanes for compute and each transport, and memory under them."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .exposure import COMPUTE, Timeline

_WIDTH, _LEFT, _LANE, _MEMORY, _TOP, _GAP = 960, 90, 20, 60, 44, 30
_COLOURS = {COMPUTE: "#4c956c", "weft": "#2b6cb0", "NVLink": "#c8553d", "network": "#8d5a97"}
_WIDE_LEFT = 130  # of names of lanes
_INK, _PALE, _OTHER, _FILL = "#24292f", "#f2f4f6", "#a7adb5", "#cfd8e3"


@dataclass(frozen=True)
class DrawnOrder:
    """An order's lanes and its memory.

    Attributes:
        spans: (lane, name, begin, end), in microseconds.
        memory: (time, bytes held), in the order of time.
    """

    spans: tuple[tuple[str, str, float, float], ...] = ()
    memory: tuple[tuple[float, int], ...] = ()

    @staticmethod
    def of(line: Timeline, live: Sequence[int]) -> DrawnOrder:
        return DrawnOrder(tuple(line.spans), tuple(line.memory(live)))

    @property
    def end(self) -> float:
        return max((end for *_, end in self.spans), default=0.0)


def order_svg(title: str, orders: Sequence[tuple[str, DrawnOrder]]) -> str:
    """The SVG of some orders below each other, all of one scale.

    Args:
        orders: words above each, and what is drawn.
    """
    longest = max((drawn.end for _, drawn in orders), default=0.0) or 1.0
    highest = max((size for _, drawn in orders for _, size in drawn.memory), default=0) or 1
    scale = (_WIDTH - _LEFT - 20) / longest
    used = {lane for _, drawn in orders for lane, *_ in drawn.spans}
    lanes = [lane for lane in (*_COLOURS, *sorted(used - _COLOURS.keys())) if lane in used]
    parts: list[str] = []
    y = _TOP
    for words, drawn in orders:
        parts.append(_text(10, y + 8, words, ' font-weight="bold"'))
        y += 16
        for lane in lanes:
            spans = [span for span in drawn.spans if span[0] == lane]
            parts += [_text(10, y + 13, lane), _box(_LEFT, y, longest * scale, _LANE - 4, _PALE)]
            parts += _spans(spans, _LEFT, y, scale, {lane: _COLOURS.get(lane, _OTHER)})
            y += _LANE
        parts += [_text(10, y + 13, "memory"), _text(10, y + 28, f"{highest / 1e6:.4g} MB")]
        parts.append(_steps(drawn, y + _MEMORY, scale, (_MEMORY - 6) / highest))
        y += _MEMORY + _GAP
    return _framed(title, y, parts)


def lanes_svg(
    title: str, lanes: Mapping[str, Sequence[tuple[str, str, float, float]]], colours: Mapping[str, str]
) -> str:
    """The SVG of lanes below each other, all of one scale.

    Args:
        lanes: of each (kind, name, begin, end), in microseconds; what comes later is drawn over what is there.
        colours: of each kind.
    """
    longest = max((end for spans in lanes.values() for *_, end in spans), default=0.0) or 1.0
    scale = (_WIDTH - _WIDE_LEFT - 20) / longest
    parts, x = [], 10.0
    for kind, colour in colours.items():
        parts += [_box(x, 34, 12, 12, colour), _text(x + 18, 44, kind)]
        x += 36 + 7 * len(kind)
    y = 56
    for lane in sorted(lanes):
        parts += [_text(10, y + 13, lane), _box(_WIDE_LEFT, y, longest * scale, _LANE - 4, _PALE)]
        parts += _spans(lanes[lane], _WIDE_LEFT, y, scale, colours)
        y += _LANE
    return _framed(title, y + 10, parts)


def _spans(
    spans: Sequence[tuple[str, str, float, float]],
    x: float,
    y: float,
    scale: float,
    colours: Mapping[str, str],
) -> Iterator[str]:
    for kind, name, begin, end in spans:
        said = f"<title>{html.escape(name)}: {end - begin:.3g} us</title>"
        width, colour = max(0.6, (end - begin) * scale), colours[kind]
        yield _box(x + begin * scale, y, width, _LANE - 4, colour, said)


def _framed(title: str, height: float, parts: Sequence[str]) -> str:
    head = f'viewBox="0 0 {_WIDTH} {height}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="12"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {head} fill="{_INK}">',
            f"<title>{html.escape(title)}</title>",
            _box(0, 0, _WIDTH, height, "#ffffff"),
            _text(10, 22, title, ' font-size="15" font-weight="bold"'),
            *parts,
            "</svg>",
            "",
        ]
    )


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}"{more}>{html.escape(words)}</text>'


def _box(x: float, y: float, width: float, height: float, colour: str, inside: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y:g}" width="{width:.1f}" height="{height:g}" fill="{colour}">{inside}</rect>'
    )


def _steps(drawn: DrawnOrder, base: float, scale: float, per_byte: float) -> str:
    """Bytes over time: each is held until the next one."""
    path = [f"M{_LEFT} {base:g}"]
    for when, size in drawn.memory:
        path.append(f"H{_LEFT + when * scale:.1f}V{base - size * per_byte:.1f}")
    path.append(f"H{_LEFT + drawn.end * scale:.1f}V{base:g}Z")
    return f'<path d="{"".join(path)}" fill="{_FILL}" stroke="{_INK}" stroke-width="0.5"/>'
