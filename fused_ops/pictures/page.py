"""A page for browsers, in one file: no script, and nothing from elsewhere."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from .svg import STYLE

_STYLE = """\
:root{color-scheme:light dark}
body{font:14px/1.45 Helvetica,Arial,sans-serif;margin:0 auto;padding:8px 16px 32px;max-width:1200px;
background:#fff;color:#24292f}
@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}}
h1{font-size:20px}h2{font-size:16px;margin:28px 0 4px}h3{font-size:13px;margin:12px 0 2px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:max-content}
td,th{padding:3px 16px 3px 0;text-align:left;vertical-align:top;max-width:32em;border-bottom:1px solid #8884}
.number{text-align:right}.number,td:first-child{white-space:nowrap}
pre{white-space:pre-wrap;overflow-wrap:anywhere;font-size:12px}summary{cursor:pointer}
.legend{display:flex;flex-wrap:wrap;align-items:center;gap:2px 14px;margin:4px 0}
.lane,.lanes h3{font-size:12px;position:sticky;left:0;width:max-content;max-width:100%}
.lanes svg{display:block}.legend svg{display:inline}.lanes{font-size:12px}
.lanes:has(.x4:checked) .wide{width:400%}.lanes:has(.x16:checked) .wide{width:1600%}
.lanes:has(.x64:checked) .wide{width:6400%}
"""


def page(title: str, parts: Iterable[str]) -> str:
    """The page of some parts, which are HTML, below a title."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}{STYLE}</style>",
            f"<h1>{html.escape(title)}</h1>",
            *parts,
            "",
        ]
    )


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[str] = ()) -> str:
    """A table that scrolls where it is wider than the page; ``numbers``: columns that end at the right."""
    marks = [" class=number" if name in numbers else "" for name in head]
    cells = [
        "".join(f"<{tag}{mark}>{html.escape(cell)}" for mark, cell in zip(marks, row, strict=True))
        for tag, row in [("th", head), *(("td", row) for row in rows)]
    ]
    return f"<div class=scroll><table>{''.join(f'<tr>{row}' for row in cells)}</table></div>"


def text_html(text: str) -> str:
    """Lines of text as they are, broken where they are wider than the page."""
    return f"<pre>{html.escape(text)}</pre>"


def details_html(words: str, text: str, *, opened: bool) -> str:
    """Text that shows when its words are clicked on."""
    return f"<details{' open' * opened}><summary>{html.escape(words)}</summary>{text_html(text)}</details>"
