"""What a user sees of each fault, and after how long, as a table for README.md beside this file.

python tests/faults/table.py                            # CPU ranks
python tests/faults/table.py --device cuda --ranks 4 --deadline 0.5 --output faults.md    # GPUs
python tests/faults/table.py --device cuda --ranks 4 --share 2    # four ranks that take turns on two GPUs
python tests/faults/table.py --cost                     # what the checked mode adds to a call
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from faults.cases import STRIKES_AT, Seen, kills, strike, strikes
from faults.inject import Fault
from faults.ops import OPS
from ranks import run_ranks
from weft import symm_mem
from weft.fused_ops import one_shot_all_reduce

CULPRIT = 1

ROWS = {
    ("delay", "before the call"): "a rank comes {late} s late",
    ("stop", "before the call"): "a rank is stopped (SIGSTOP) for {late} s",
    ("raise", "after a push"): "an exception inside a call of one rank",
    ("kill", "before the call"): "a rank is killed (SIGKILL) between calls",
    ("kill", "after a push"): "a rank is killed inside a call",
    ("skip", "before the call"): "a rank leaves a call out (checked mode)",
    ("corrupt", "before the call"): "a rank calls with another argument (checked mode)",
    ("fork", "before the call"): "a rank forks, and the child calls",
}


def faults(device: str, deadline: float) -> Iterator[tuple[str, Fault]]:
    for (kind, point), row in ROWS.items():
        if device == "cpu" or (point == "before the call" and kind != "fork"):  # CUDA does not survive a fork
            late = 3 * deadline
            yield row.format(late=f"{late:g}"), Fault(kind, CULPRIT, STRIKES_AT, late, point)


def sees(error: dict[str, Any]) -> str:
    """What stands after the names of ranks, flags and lines."""
    if error["kind"] == "RankMismatch":
        return "RankMismatch on every rank, with both calls"
    if error["kind"] != "PeerTimeout":
        return str(error["kind"])
    how = "ended" if error["ended"] else "given up" if error.get("blames") is not None else "late"
    return {
        "ended": "PeerTimeout: its process has ended",
        "given up": "PeerTimeout: it has given up",
        "late": "PeerTimeout after the deadline",
    }[how]


def measure(size: int, device: str, deadline: float, gpus: int | None = None) -> dict[str, list[Seen]]:
    """What the other ranks see, by row, over all ops. ``gpus``: as of ``run_ranks``."""
    run = partial(run_ranks, store="tcp", device=device, gpus=gpus)
    found: dict[str, list[Seen]] = {}
    rows = list(faults(device, deadline))
    alive = [(row, fault) for row, fault in rows if fault.kind != "kill"]
    for op in OPS:
        by_rank = run(strikes, size, op, [f for _, f in alive], deadline)
        for i, (row, _) in enumerate(alive):
            found.setdefault(row, []).extend(seen[i] for r, seen in enumerate(by_rank) if r != CULPRIT)
    for row, fault in rows:
        if fault.kind == "kill" and fault.point == "before the call":
            seen = run(kills, size, CULPRIT, deadline, expect_dead=(CULPRIT,))
            found.setdefault(row, []).extend(s for r, of in enumerate(seen) if r != CULPRIT for s in of)
        elif fault.kind == "kill":
            for op in OPS:
                seen = run(strike, size, op, fault, deadline, False, expect_dead=(CULPRIT,))
                found.setdefault(row, []).extend(s for r, s in enumerate(seen) if r != CULPRIT)
    return {row: found[row] for row, _ in rows}


def compared(rank: int, size: int, calls: int) -> tuple[float, float]:
    """Microseconds of an all-reduce of 10 numbers, plain and checked: the best of many short rounds each."""
    x = torch.ones(10)
    best = [float("inf"), float("inf")]
    for _ in range(100):
        for checked in (False, True):
            symm_mem.set_checked(checked)
            one_shot_all_reduce(x, "sum", None)
            begin = time.perf_counter()
            for _ in range(calls):
                one_shot_all_reduce(x, "sum", None)
            best[checked] = min(best[checked], (time.perf_counter() - begin) / calls * 1e6)
    symm_mem.set_checked(False)
    return best[0], best[1]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--share", type=int, metavar="GPUS", help="CUDA ranks share so many, not for --cost")
    parser.add_argument("--deadline", type=float, default=1.0, help="seconds, of the calls that fail")
    parser.add_argument("--cost", action="store_true", help="of the checked mode, instead of the table")
    parser.add_argument("--output", type=Path, help="write it to this file, too")
    options = parser.parse_args()
    size, device = options.ranks, options.device
    if options.share is not None and (device != "cuda" or options.share < 1 or options.cost):
        parser.error("--share: must be 1 or more, with --device cuda and without --cost")
    if device == "cuda" and torch.cuda.device_count() < (options.share or size):
        sys.exit(f"--ranks, --share: {options.share or size} GPUs, here are {torch.cuda.device_count()}")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)
        if options.output is not None:
            options.output.write_text("\n".join(lines) + "\n")

    if options.cost:
        for ranks in sorted({2, size}):
            plain, checked = run_ranks(compared, ranks, 20, device=device)[0]
            say(f"{ranks} ranks on {device}: {plain:.0f} us a call, {checked:.0f} us checked")
        return
    begin = time.monotonic()
    found = measure(size, device, options.deadline, options.share)
    where = device if options.share is None else f"{options.share} GPUs"
    say(f"{len(OPS)} ops, {size} ranks on {where}, deadline {options.deadline:g} s\n")
    say("| fault | what the other ranks see | after |\n|---|---|---|")
    for row, seen in found.items():
        kinds = sorted({sees(s.error) if s.error else "nothing" for s in seen})
        programs = [p for s in seen for p in (s, s.beside, s.after) if p is not None]
        wrong = sum(len(p.wrong) for p in programs)
        unwell = sum(p.error is not None for s in seen for p in (s.beside, s.after) if p is not None)
        times = sorted(s.seconds for s in seen)
        remark = f"; {wrong} wrong results" * bool(wrong) + f"; {unwell} errors elsewhere" * bool(unwell)
        say(f"| {row} | {'; '.join(kinds)}{remark} | {times[0]:.3f} to {times[-1]:.3f} s |")
    say(f"\nmeasured in {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
