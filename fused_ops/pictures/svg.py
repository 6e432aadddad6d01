"""What pictures consist of: text, boxes, lines and legends, in colours for light and dark screens."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

_COLOURS = {  # on light, on dark
    "ink": ("#24292f", "#e6edf3"),
    "paper": ("#ffffff", "#0d1117"),
    "pale": ("#f2f4f6", "#1c2128"),
    "grid": ("#dfe3e8", "#30363d"),
    "grey": ("#a7adb5", "#7d848c"),
    "green": ("#4c956c", "#5fb384"),
    "blue": ("#2b6cb0", "#4a90d9"),
    "red": ("#c8553d", "#e0735c"),
    "ochre": ("#e0a458", "#e0a458"),
    "brown": ("#8f5b2e", "#b98050"),
    "violet": ("#8d5a97", "#b07fba"),
}
_SCREENS = [
    "".join(f"svg .{name}{{fill:{shades[i]};stroke:{shades[i]}}}" for name, shades in _COLOURS.items())
    for i in (0, 1)
]
#: The rules of all classes. A bar that is thinner than a pixel is seen by its edge.
STYLE = (
    f"{_SCREENS[0]}@media(prefers-color-scheme:dark){{{_SCREENS[1]}}}"
    "svg text[x]{stroke:none}svg .line{fill:none}svg .filled{fill-opacity:.35}"
    "svg rect{stroke-width:.6px}svg rect,svg path{vector-effect:non-scaling-stroke}"
)
_FONT = 'font-family="Helvetica, Arial, sans-serif"'
_LETTER, _MARK = 6.7, 22  # widths


def label(x: float | str, y: float, words: str, anchor: str = "start", *, bold: bool = False) -> str:
    """Text at a place; ``anchor``: which part of it is there, "start", "middle" or "end"."""
    more = ("" if anchor == "start" else f' text-anchor="{anchor}"') + (' font-weight="bold"' if bold else "")
    at = f"{x:.7g}" if not isinstance(x, str) else x
    return f'<text class="ink" x="{at}" y="{y:.6g}"{more}>{html.escape(words, quote=False)}</text>'


def box(x: float, y: float, size: tuple[float, float], colour: str, says: str = "") -> str:
    """A filled rectangle; ``says``: what it says under the pointer."""
    tip = f"<title>{html.escape(says, quote=False)}</title>" if says else ""
    width, height = size
    return f'<rect class="{colour}" x="{x:.7g}" y="{y:.6g}" width="{width:.6g}" height="{height:.6g}">{tip}</rect>'


def path(d: str, colour: str, width: float = 1, dashes: str = "") -> str:
    """A line; ``colour`` may have "filled" after it."""
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    kind = colour if "filled" in colour else f"line {colour}"
    return f'<path class="{kind}" d="{d}" stroke-width="{width:g}"{dashed}/>'


def swatch(colour: str) -> str:
    """The mark of bars in a legend."""
    return box(5, 0, (12, 12), colour)


def stroke(colour: str, width: float = 1, dashes: str = "") -> str:
    """The mark of a line in a legend."""
    return path(f"M0 6h{_MARK}", colour, width, dashes)


def legend_svg(marks: Mapping[str, str], place: tuple[float, float], right: float) -> tuple[list[str], float]:
    """Marks and their words in lines that end before ``right``, and where the last line ends."""
    (left, y), parts = place, []
    x = left
    for words, mark in marks.items():
        wide = _MARK + 22 + _LETTER * len(words)
        if x > left and x + wide > right:
            x, y = left, y + 20
        parts.append(f'<g transform="translate({x:.6g} {y:.6g})">{mark}{label(_MARK + 6, 11, words)}</g>')
        x += wide
    return parts, y + 12


def legend_html(marks: Mapping[str, str]) -> str:
    """The same of a page."""
    items = (
        f'<span><svg width="{_MARK}" height="12">{mark}</svg> {html.escape(words)}</span>'
        for words, mark in marks.items()
    )
    return f"<p class=legend>{' '.join(items)}</p>"


def framed(title: str, size: tuple[float, float], parts: Sequence[str], note: str = "") -> str:
    """The SVG of some parts below a title, which is 30 high, or 48 with a note."""
    view = f'viewBox="0 0 {size[0]:.6g} {size[1]:.6g}" role="img" {_FONT} font-size="12"'
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" {view}>',
            f"<title>{html.escape(title)}</title>",
            f"<style>{STYLE}</style>",
            box(0, 0, size, "paper"),
            f'<g font-size="15">{label(10, 22, title, bold=True)}</g>',
            *([label(10, 40, note)] if note else []),
            *parts,
            "</svg>",
            "",
        ]
    )
