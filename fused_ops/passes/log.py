"""The line that the logger ``weft.passes`` gets for each graph."""

from __future__ import annotations

import logging

from ...symm_mem import resolve_group
from .report import Report

_log = logging.getLogger("weft.passes")


def log_line(number: int, report: Report) -> None:
    """At INFO by the first rank of each group; the others have the same to say, and say it at DEBUG."""
    level = logging.INFO if any(_is_first(e.group) for e in report.entries) else logging.DEBUG
    _log.log(level, "%s", _line(number, report))


def _is_first(group: str | None) -> bool:
    try:
        return group is None or resolve_group(group).rank() == 0
    except ValueError:
        return True


def _line(number: int, report: Report) -> str:
    text = f"graph {number}: {report.fused} of {len(report.entries)} collectives fused"
    if report.gain:
        text += f", should save {report.gain:.3g} us"
    left = [e for e in report.entries if e.fused_into is None]
    return f"{text}; {left[0].node} left alone: {left[0].reason}" if left else text
