"""A report as a table by layer, and what is left alone by reason, each with what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from .entry import Entry, as_ranges, without_numbers

HEAD = ("in", "collective", "times", "each", "became", "saves")
NUMBERS = ("times", "each", "saves")
_WIDEST = 56  # of a cell
_WIDTH = 120  # of a line of text
#: What a reason holds, and what a user can do about it; the first that fits.
_HINTS = (
    ("too little is ", "nothing, unfused it is as fast; FusionPass(fuse='always') fuses it all the same"),
    ("left to the backend", "nothing, the backend is as fast at this size"),
    ("its group has one rank", "nothing is sent; a mesh without this dimension saves the call"),
    ("not float32, bfloat16 or float16", "cast to one of these before the collective"),
    ("none of those this pass is for", "add its group to FusionPass(groups=...)"),
    ("used without waiting", "wait for its result before anything uses it"),
    ("not known before the run", "compile with dynamic=False, or mark the sizes as static"),
    ("depends on data", "take sizes that do not depend on data"),
    ("also used by", "have the other user take the last result: the op keeps none between"),
)
_SEQUENCE_PARALLEL = (
    "FusionPass(sequence_parallel=True) makes reduce-scatters and all-gathers of them, which are fused "
    "with matmuls"
)


def fused_with(entry: Entry) -> str:
    """With what a collective was fused: "with a matmul", "with a norm", "with a loss", or "exchanged": no other op."""
    op = entry.fused_into or ""
    for word, kind in (("matmul", "with a matmul"), ("norm", "with a norm"), ("entropy", "with a loss")):
        if word in op:
            return kind
    return "exchanged for weft's"


def _size(nbytes: int | None) -> str:
    if nbytes is None:
        return ""
    return f"{nbytes / 2**20:.3g} MiB" if nbytes >= 2**20 else f"{nbytes / 2**10:.3g} KiB"


def _row(entries: Sequence[Entry]) -> tuple[str, ...]:
    first = entries[0]
    where = as_ranges([e.module for e in entries]) or f"graph {as_ranges([str(e.graph) for e in entries])}"
    where = f"{first.model}: {where}" if first.model else where
    if first.fused_into is None:
        became = "left alone"
    else:
        became = first.fused_into.removeprefix("weft::") + (" (unfused)" if first.unfused else "")
    gains = [e.gain for e in entries if e.gain and e.plan is not None and not e.unfused]
    saves = f"{sum(gains):.3g} us" if gains else ""
    return where, first.collective, str(len(entries)), _size(first.nbytes), became, saves


def table_rows(entries: Iterable[Entry]) -> list[tuple[str, ...]]:
    """A row of cells for those that differ in the numbers of layers only."""
    groups: dict[tuple[object, ...], list[Entry]] = {}
    for e in entries:
        where = without_numbers(e.module) or e.graph
        alike = e.model, where, e.collective, e.nbytes, e.fused_into, e.unfused
        groups.setdefault(alike, []).append(e)
    return [_row(group) for group in groups.values()]


def table_lines(entries: Sequence[Entry]) -> list[str]:
    rows = [tuple(cell[:_WIDEST] for cell in row) for row in (HEAD, *table_rows(entries))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    right = [name in NUMBERS for name in HEAD]
    return [
        "  ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ).rstrip()
        for row in rows
    ]


def wrapped(texts: Iterable[str]) -> Iterator[str]:
    """Lines that fit beside the table."""
    for line in "\n".join(texts).splitlines():
        by = " " * (len(line) - len(line.lstrip()) + 4)
        yield from wrap(line, _WIDTH, subsequent_indent=by, break_long_words=False, break_on_hyphens=False)


def summary_of(entries: Sequence[Entry]) -> str:
    """How many collectives are fused, with what, and how many are not."""
    kinds = Counter(fused_with(e) for e in entries if e.fused)
    with_what = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    fused = sum(kinds.values())
    unfused = sum(e.unfused for e in entries)
    more = f"; {unfused} more are in graphs that ran unfused each time" if unfused else ""
    return f"{fused} of {len(entries)} collectives fused{f': {with_what}' if with_what else ''}{more}"


def reasons_of(entries: Sequence[Entry]) -> Iterator[str]:
    """How many collectives were left alone for each reason, the most frequent first, and what to do about it."""
    left = [e.reason for e in entries if e.fused_into is None]
    first: dict[str, str] = {}
    for reason in left:
        first.setdefault(without_numbers(reason), reason)
    if left:
        yield "left alone:"
    for key, count in Counter(map(without_numbers, left)).most_common():
        yield f"{count:5}  {first[key]}"
        if hint := next((do for part, do in _HINTS if part in first[key]), ""):
            yield f"       to do: {hint}"


def advice_of(entries: Sequence[Entry]) -> Iterator[str]:
    """What could be set so that more is fused with matmuls."""
    beside = sum(
        e.fused_into == "weft::one_shot_all_reduce"
        and e.form.startswith("product")
        and "sequence parallel" not in e.detail
        for e in entries
    )
    if beside:
        which = f"{beside} all-reduces follow matmuls" if beside > 1 else "1 all-reduce follows a matmul"
        yield f"{which}, fused with none: {_SEQUENCE_PARALLEL}"
