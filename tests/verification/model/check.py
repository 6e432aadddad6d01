"""The protocols as models for SPIN: `make model` checks them all, whole and broken on purpose.

workspace.pml is the protocol of symm_mem/workspace.py, all_reduce.pml that of kernels/all_reduce/kernel.cu, and
all_reduce_rounds.pml what holds where it uses its slots several times in one launch. transfers.pml is that of tensors
that are registered. SPIN looks at every order of every step of all ranks, and of every store on its way. A whole model
must have no error; a model with one rule broken must have one, or the model would not see what it is there for.

SPIN: `apt install spin`, `brew install spin`, or https://spinroot.com. It needs a C compiler, too.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HOLDS, WRONG, STUCK = "holds", "assertion violated", "invalid end state"
MEMORY = 6000  # MiB that a check may take


@dataclass(frozen=True)
class Case:
    """A model with its sizes, and what must come out.

    HOLDS, WRONG (data was read that is not there yet, or no longer) or STUCK (somebody waits for ever).
    """

    model: str
    sizes: str
    outcome: str = HOLDS
    broken: str = ""

    def defines(self) -> list[str]:
        broken = [f"-DBREAK_{self.broken}"] if self.broken else []
        return [f"-D{size}" for size in self.sizes.split()] + broken

    def __str__(self) -> str:
        return f"{self.model} {self.sizes}" + (f" without {self.broken}" if self.broken else "")


@dataclass(frozen=True)
class Finding:
    outcome: str
    states: int
    depth: int
    seconds: float


_W2 = "W=2 CALLS=4 CHUNKS=1 GROWTHS=0"
_GROWN = "W=2 CALLS=4 CHUNKS=1 GROWTHS=2"
# Memory used again by three ranks: of the stores on their way only those of 'done', which alone can be late for it, one
# buffer, and growth before calls 1 and 2, so that calls 2, 3 and 4 use the memory of call 0.
_AGAIN = "W=3 CALLS=5 CHUNKS=1 GROWTHS=2 BUFFERS=1 ALWAYS_GROW=1 PROMPT=1"
_LL_PROTOCOL = "W=2 CALLS=4 CHUNKS=2 GROWTHS=0 LL_PROTOCOL=1"
_REDUCED = "W=2 CALLS=3 BLOCKS=2 WORDS=1 FORMS=1 LEAST=1 RESIDENT=1"
# Uses of one chunk suffice with one trip, and for what is wrong with either.
_ROUNDS = "W=2 WORKERS=1 CALLS=2 LEAST=1 MOST=3 PARTS=1 TRIPS=1 PROMPT=0"
_TRANSFERS = "W=2 TURNS=3 AGAIN=2"
_TWO_WORKERS = "W=2 WORKERS=2 CALLS=1 LEAST=3 MOST=3 PARTS=1 TRIPS=1 PROMPT=1"

#: Part of `make test` where SPIN is there. The others change with the models alone, not with the library.
SMALL = [Case("workspace", "W=2 CALLS=4 CHUNKS=2 GROWTHS=0"), Case("workspace", _W2, WRONG, "REUSE")]
LARGE = [
    Case("workspace", _W2, WRONG, "FLAG"),
    Case("workspace", _W2, STUCK, "LOST_DONE"),
    Case("workspace", _LL_PROTOCOL),
    Case("workspace", _LL_PROTOCOL, WRONG, "KEPT"),
    Case("workspace", _LL_PROTOCOL, STUCK, "EMPTIED"),
    Case("all_reduce", _REDUCED),
    Case("all_reduce", _REDUCED, WRONG, "BUFFERS"),
    Case("all_reduce", _REDUCED, STUCK, "ORDER"),
    Case("all_reduce_rounds", _ROUNDS),
    Case("all_reduce_rounds", _ROUNDS, WRONG, "FENCE"),
    Case("all_reduce_rounds", "W=2 WORKERS=1 CALLS=2 LEAST=1 MOST=3 PARTS=2 TRIPS=2 PROMPT=1"),
    Case("all_reduce_rounds", "W=2 WORKERS=1 CALLS=1 LEAST=3 MOST=3 PARTS=1 TRIPS=2 PROMPT=1", STUCK),
    Case("transfers", _TRANSFERS),
    Case("transfers", _TRANSFERS, WRONG, "ALLOWED"),
    Case("transfers", _TRANSFERS, WRONG, "DATA"),
    Case("transfers", _TRANSFERS, STUCK, "LOST"),
    Case("workspace", "W=2 CALLS=7 CHUNKS=2 GROWTHS=0"),
    Case("workspace", "W=2 CALLS=5 CHUNKS=1 GROWTHS=2"),
    Case("workspace", "W=3 CALLS=3 CHUNKS=1 GROWTHS=0"),
    Case("workspace", "W=3 CALLS=2 CHUNKS=1 GROWTHS=1"),
    Case("workspace", _AGAIN),
    Case("workspace", "W=2 CALLS=6 CHUNKS=2 GROWTHS=0 LL_PROTOCOL=1"),
    Case("workspace", "W=2 CALLS=5 CHUNKS=1 GROWTHS=2 LL_PROTOCOL=1"),
    Case("workspace", "W=3 CALLS=3 CHUNKS=1 GROWTHS=0 LL_PROTOCOL=1"),
    Case("workspace", _LL_PROTOCOL, WRONG, "REUSE"),
    Case("workspace", _W2, WRONG, "REUSE_LATE"),
    Case("workspace", _W2, WRONG, "DONE"),
    Case("workspace", "W=3 CALLS=3 CHUNKS=1 GROWTHS=0", WRONG, "REUSE"),
    Case("workspace", _GROWN, WRONG, "QUIESCE"),
    Case("workspace", _GROWN, WRONG, "AGREE"),
    Case("workspace", _GROWN, STUCK, "ZEROED"),
    Case("workspace", _AGAIN, WRONG, "QUIESCE"),
    Case("workspace", _AGAIN, WRONG, "AGREE"),
    Case("workspace", _AGAIN, STUCK, "ZEROED"),
    Case("all_reduce", "W=2 CALLS=3 BLOCKS=2 WORDS=2 FORMS=2 LEAST=1 RESIDENT=1"),
    Case("all_reduce", "W=2 CALLS=3 BLOCKS=2 WORDS=2 FORMS=1 LEAST=1 RESIDENT=2"),
    Case("all_reduce", "W=3 CALLS=3 BLOCKS=1 WORDS=1 FORMS=2 LEAST=2 RESIDENT=1"),
    Case("all_reduce", "W=3 CALLS=4 BLOCKS=1 WORDS=2 FORMS=1 LEAST=1 RESIDENT=1"),
    Case("all_reduce", "W=2 CALLS=3 BLOCKS=1 WORDS=2 FORMS=1 LEAST=1 RESIDENT=1", WRONG, "WORDS"),
    Case("all_reduce", _REDUCED, WRONG, "EMPTY"),
    Case("all_reduce", _REDUCED, STUCK, "ZEROS"),
    Case("all_reduce", _REDUCED, STUCK, "VECTOR"),
    Case("all_reduce_rounds", "W=2 WORKERS=1 CALLS=2 LEAST=1 MOST=3 PARTS=2 TRIPS=2 PROMPT=0"),
    Case("all_reduce_rounds", "W=2 WORKERS=1 CALLS=2 LEAST=1 MOST=5 PARTS=2 TRIPS=2 PROMPT=1"),
    Case("all_reduce_rounds", "W=2 WORKERS=1 CALLS=2 LEAST=1 MOST=5 PARTS=2 TRIPS=1 PROMPT=0"),
    Case("all_reduce_rounds", "W=3 WORKERS=1 CALLS=1 LEAST=3 MOST=3 PARTS=1 TRIPS=1 PROMPT=1"),
    Case("all_reduce_rounds", _TWO_WORKERS),
    Case("all_reduce_rounds", "W=2 WORKERS=2 CALLS=1 LEAST=5 MOST=5 PARTS=2 TRIPS=1 PROMPT=1"),
    Case("all_reduce_rounds", _ROUNDS, WRONG, "HEAR"),
    Case("all_reduce_rounds", _ROUNDS, STUCK, "FIRST"),
    Case("all_reduce_rounds", _ROUNDS, WRONG, "LAST"),
    Case("all_reduce_rounds", _TWO_WORKERS, WRONG, "EMPTIED"),
    Case("transfers", "W=2 TURNS=6 AGAIN=3"),
    Case("transfers", "W=3 TURNS=3 AGAIN=1"),
    Case("transfers", "W=3 TURNS=3 AGAIN=2"),
    Case("transfers", _TRANSFERS, WRONG, "DONE"),
    Case("transfers", _TRANSFERS, WRONG, "EARLY"),
    Case("transfers", _TRANSFERS, WRONG, "SIGNAL"),
    Case("transfers", _TRANSFERS, WRONG, "ZEROED"),
    Case("transfers", _TRANSFERS, WRONG, "QUIESCE"),
    Case("transfers", _TRANSFERS, STUCK, "MEET"),
]


def spin() -> str | None:
    """SPIN's program: what the environment variable SPIN says, else the one on the path."""
    return shutil.which(os.environ.get("SPIN") or "spin")


def compiler() -> str | None:
    return shutil.which(os.environ.get("CC") or "cc")


def missing() -> str | None:
    """What is wanting on this machine, if anything is."""
    if spin() is None:
        return "needs SPIN: apt install spin, or SPIN=its path"
    return "needs a C compiler" if compiler() is None else None


def check(case: Case, seconds: float) -> Finding:
    """Look at every state of a case.

    Raises:
        RuntimeError: SPIN does not take the model, or did not come to its end in ``seconds`` and MEMORY.
    """
    program, cc = spin(), compiler()
    assert program is not None and cc is not None, missing()
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-model-") as folder:
        model = shutil.copy(HERE / f"{case.model}.pml", folder)
        # States are kept as 64-bit hashes: that two of 10^7 are taken for one has a chance of about 10^-6 or 10^-5.
        quick = "-Og" if case in SMALL else "-O2"  # gcc takes longer than the search
        options = [quick, "-w", "-DSAFETY", "-DHC4", "-DVECTORSZ=4096", f"-DMEMLIM={MEMORY}"]
        for command in ([program, *case.defines(), "-a", model], [cc, *options, "-o", "pan", "pan.c"]):
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                raise RuntimeError(f"{case}: {' '.join(command)}\n{done.stdout}{done.stderr}")
        try:
            said = subprocess.run(
                ["./pan", "-m1000000", "-n"],
                cwd=folder,
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            ).stdout
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{case}: not at its end after {seconds:g} s") from None
    return _read(case, said, time.monotonic() - start)


def _read(case: Case, said: str, seconds: float) -> Finding:
    errors = re.search(r"errors: (\d+)", said)
    states = re.search(r"^\s*([\d.e+]+) states, stored", said, re.M)
    depth = re.search(r"depth reached (\d+)", said)
    if errors is None or states is None or depth is None:
        raise RuntimeError(f"{case}: SPIN has failed\n{said}")
    if errors[1] == "0" and "Search not completed" in said:
        raise RuntimeError(f"{case}: SPIN did not look at every state in {MEMORY} MiB\n{said}")
    outcome = HOLDS
    if errors[1] != "0":
        found = re.search(r"^pan:1: (assertion violated|invalid end state)", said, re.M)
        outcome = found[1] if found else said
    return Finding(outcome, int(float(states[1])), int(depth[1]), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="only those of a few seconds")
    parser.add_argument("--seconds", type=float, default=1800, help="for each case")
    args = parser.parse_args()
    if (reason := missing()) is not None:
        sys.exit(f"make model {reason}")
    wrong = 0
    for case in SMALL if args.small else SMALL + LARGE:
        found = check(case, args.seconds)
        right = found.outcome == case.outcome
        wrong += not right
        verdict = found.outcome if right else f"{found.outcome.upper()}, must be: {case.outcome}"
        print(
            f"{case!s:88} {found.states:>9} states, depth {found.depth:>4}, {found.seconds:5.1f} s: {verdict}",
            flush=True,
        )
    sys.exit(f"{wrong} cases came out wrong" if wrong else 0)


if __name__ == "__main__":
    main()
