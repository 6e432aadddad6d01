"""Reports without a changed line of the program: a line of the log for each graph, and the file of WEFT_REPORT."""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ....symm_mem import resolve_group
from .report import Report

VARIABLE = "WEFT_REPORT"
_RANK = "{rank}"
_log = logging.getLogger("weft.passes")
_reports: list[Callable[[], Report]] = []
_failed: set[str] = set()
_rank: int | None = None  # as long as there was a group


def log_line(number: int, report: Report) -> None:
    """For ``weft.passes``: at INFO by the first rank of each group; the others, with the same to say, at DEBUG."""
    text = f"graph {number}: {report.fused} of {len(report.entries)} collectives fused"
    if report.gain:
        text += f", should save {report.gain:.3g} us"
    if left := [e for e in report.entries if e.fused_into is None]:
        text += f"; {left[0].node} left alone: {left[0].reason}"
    level = logging.INFO if any(_is_first(e.group) for e in report.entries) else logging.DEBUG
    _log.log(level, "%s", text)


def _is_first(group: str | None) -> bool:
    try:
        return group is None or resolve_group(group).rank() == 0
    except ValueError:
        return True


def put_into_file(report: Callable[[], Report]) -> None:
    """Has a pass's report in the file that WEFT_REPORT names, if it names one: at the process's end at the latest."""
    if not os.environ.get(VARIABLE):
        return
    _note_rank()
    if not _reports:
        atexit.register(write_reports)
    _reports.append(report)


def write_reports() -> None:
    """Writes the file anew. A pass does so after each graph, too: a server's ranks end without a last word."""
    path = os.environ.get(VARIABLE)
    if not path or not _reports:
        return
    _note_rank()
    rank = int(os.environ.get("RANK", "0")) if _rank is None else _rank
    if rank and _RANK not in path:
        return
    path = path.replace(_RANK, str(rank))
    reports = [report() for report in _reports]
    texts = [r.details() for r in reports if r.runs.graphs or r.runs.keys or r.entries] or [
        reports[0].details()
    ]
    try:
        # Whole or not at all: somebody may be reading it.
        new = Path(f"{path}.{os.getpid()}")
        new.write_text("\n\n".join(dict.fromkeys(texts)) + "\n")
        new.replace(path)
    except OSError as e:
        if path not in _failed:
            _failed.add(path)
            _log.warning("%s: cannot write %r: %s", VARIABLE, path, e)


def _note_rank() -> None:
    """Now: at the end the groups may be destroyed, and only torchrun's processes then know which rank they were."""
    global _rank
    if dist.is_available() and dist.is_initialized():
        _rank = dist.get_rank()
