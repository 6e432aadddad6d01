"""What all suites have: their shape, the start of their ranks, and what a run prints and writes."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, ClassVar

import machine
import report
import torch
import torch.distributed as dist
from charts import chart

RUN = Path(__file__).resolve().parent / "run.py"


def words(text: str) -> tuple[str, ...]:
    """An option's words, which commas separate."""
    return tuple(word for word in text.split(",") if word)


def numbers(text: str) -> tuple[int, ...]:
    """An option's numbers, which commas separate."""
    return tuple(int(word) for word in words(text))


class Run:
    """What a suite measures with: the options, this rank's device, and what is printed and written at the end.

    ``rows`` are written as JSON; without them what was printed is, as text. ``wrong`` is the exit status.
    """

    def __init__(self, given: argparse.Namespace, device: torch.device) -> None:
        self.given, self.device = given, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.on_gpus = device.type == "cuda"
        self.mode = "graph" if self.on_gpus else "eager"
        self.rows: list[dict[str, Any]] = []
        self.more: dict[str, Any] = {}
        self.wrong = False
        self._printed: list[str] = []
        folder: Path | None = given.results
        command = given.command
        if folder is not None and folder.is_absolute():
            command = command.replace(str(folder), folder.name)
        self.meta = {
            "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            **machine.described(device.type, self.world),
            "command": command,
        }

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._get_default_group()

    def say(self, *lines: object) -> None:
        """Rank 0 prints them at once."""
        if self.rank == 0 and lines:
            self._printed += map(str, lines)
            print(*lines, sep="\n", flush=True)

    def write(self) -> None:
        folder: Path | None = self.given.results
        if self.rank or folder is None:
            return
        name = f"{self.meta['device']}-x{self.world}-{self.given.suite}"
        if self.rows:
            written = report.write(self.rows, self.meta, folder, self.given.suite, self.more)
        else:
            written = [report.write_text(folder / f"{name}.txt", self._printed)]
        print(*(f"wrote {path}" for path in written), sep="\n", flush=True)

    def draw(self) -> None:
        """A chart of each results file, beside it or in the current folder."""
        if self.rank or not self.given.plot:
            return
        folder: Path = self.given.results or Path()
        folder.mkdir(parents=True, exist_ok=True)
        for name, rows in report.by_file(self.rows, self.given.suite).items():
            path = folder / f"{self.meta['device']}-x{self.world}-{name}.svg"
            try:
                path.write_text(chart({"meta": self.meta, "rows": rows}, name))
                print(f"wrote {path}", flush=True)
            except ValueError as e:
                print(f"{name}: {e}", flush=True)


class Suite:
    """A table: its options, its rows, and how one of them is measured. A subclass's docstring is its help."""

    ranks: ClassVar[int | None] = None  # of a suite that is of so many
    device: ClassVar[str | None] = None
    plots: ClassVar[bool] = False  # its rows have "weft_us": charts.py draws them

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        """A subclass adds its own."""
        on = self.device or ("cuda" if torch.cuda.is_available() else "cpu")
        parser.add_argument("--ranks", type=int, help="default: one a GPU, or 2")
        parser.add_argument("--device", choices=("cuda", "cpu"), default=on)
        parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the results are written")
        parser.set_defaults(plot=False)
        if self.plots:
            parser.add_argument(
                "--plot", action="store_true", help="an SVG of the results, in the same folder"
            )

    def rows(self, given: argparse.Namespace) -> Sequence[Any]:
        """What is measured, one after the other.

        Raises:
            ValueError: the options select something that there is not.
        """
        raise NotImplementedError

    def start(self, given: argparse.Namespace, arguments: list[str]) -> int:
        """Starts the ranks; 0 if every rank was content."""
        return self.launch(given, arguments)

    def launch(
        self, given: argparse.Namespace, arguments: list[str], environment: dict[str, str] | None = None
    ) -> int:
        """``torchrun`` with this program and these arguments."""
        cpu = given.device == "cpu"
        ranks = given.ranks or self.ranks or (0 if cpu else torch.cuda.device_count()) or 2
        # The ranks import torch and meet before the first word on stdout.
        print(f"starting {ranks} ranks on {given.device}", file=sys.stderr, flush=True)
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        environment = {"OMP_NUM_THREADS": "1", **os.environ, **(environment or {})}
        return subprocess.call([*launcher, str(RUN), *arguments], env=environment)

    def join(self, given: argparse.Namespace) -> torch.device:
        """This rank's device, once the ranks have a process group."""
        return machine.join_ranks(given.device)

    def run_rank(self, given: argparse.Namespace) -> bool:
        """Measures every row on this rank. Whether something was wrong."""
        # The collectives go by their names before torch 2.13.
        warnings.filterwarnings("ignore", ".*is deprecated", FutureWarning)
        run = Run(given, self.join(given))
        begun = time.perf_counter()
        meta = {name: value for name, value in run.meta.items() if name not in ("date", "command")}
        run.say(run.meta["date"], run.meta["command"], meta, *([] if run.on_gpus else [machine.CPU_NOTE]), "")
        self.begin(run)
        for row in given.rows:
            self.measure(row, run)
        self.end(run)
        run.write()
        run.draw()
        run.say(f"{len(given.rows)} rows in {time.perf_counter() - begun:.0f} s")
        dist.barrier()
        dist.destroy_process_group()
        return run.wrong

    def begin(self, run: Run) -> None:
        """Before the first row: the table's head, as a rule."""

    def measure(self, row: Any, run: Run) -> None:
        """Times a row's contenders in turns and says its line. Collective."""
        raise NotImplementedError

    def end(self, run: Run) -> None:
        """After the last row."""
