"""All-reduces by the process group."""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.distributed as dist
import weft
from suite import Run, Suite, numbers
from timer import Call, Schedule, Series, host_and_device, medians
from torch import Tensor

SIZES = (*(2048 << (2 * i) for i in range(8)), 64 << 20, 128 << 20)
Groups = dict[str, dist.ProcessGroup]


def _all_reduce(nbytes: int, group: dist.ProcessGroup, run: Run) -> tuple[Call, bool]:
    """In place, and whether its sums are right."""
    dtype, size = torch.bfloat16 if run.on_gpus else torch.float32, group.size()
    x = torch.full((nbytes // dtype.itemsize,), float(group.rank() + 1), dtype=dtype, device=run.device)
    dist.all_reduce(x, group=group)
    right = bool((x == size * (size + 1) / 2).all())
    x.zero_()

    def call(_: int) -> list[Tensor]:
        dist.all_reduce(x, group=group)
        return [x]

    return call, right


class ProcessGroup(Suite):
    """Eager all-reduces over the process group "weft", and over NCCL alone (between CPU ranks gloo).

    Each line has microseconds of dist.all_reduce in place: of the host, which launches a round without waiting; of the
    device, eager, after a sleep that lets the host run ahead; and in a CUDA graph. The median of the rounds, the
    slowest rank's; every sum is compared with what it must be. Between CPU ranks one clock measures all. NCCL (gloo)
    comes first, as without weft, and again beside weft's group.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--sizes", type=numbers, default=SIZES, help="bytes, by commas")

    def rows(self, given: argparse.Namespace) -> list[tuple[bool, int]]:
        """Whether a group "weft" is there, and bytes."""
        return [(beside, nbytes) for beside in (False, True) for nbytes in given.sizes]

    def begin(self, run: Run) -> None:
        self._own = "nccl" if run.on_gpus else "gloo"
        # As without weft: later all groups' calls are looked at.
        self._groups: Groups = {self._own: dist.new_group(backend=self._own)}
        columns = ("host us", "device us", "graph us") if run.on_gpus else ("us",)
        run.say(f"{'bytes':>10} {'group':<12} " + " ".join(f"{column:>10}" for column in columns))

    def measure(self, row: tuple[bool, int], run: Run) -> None:
        beside, nbytes = row
        if beside and "weft" not in self._groups:
            weft_group = dist.new_group(backend="weft")
            self._groups = {f"{self._own} beside": self._groups[self._own], "weft": weft_group}
        made = {name: _all_reduce(nbytes, group, run) for name, group in self._groups.items()}
        plan = Schedule(20, cycles=3)
        eager = self._series(made, plan, "eager", run)
        found = {name: list(us) for name, us in host_and_device(eager, plan.cycles, run.device).items()}
        if run.on_gpus:
            graphs = medians(self._series(made, plan, "graph", run), plan.cycles, run.device)
            for name, us in graphs.items():
                found[name].append(us)
        for name, (_, right) in made.items():
            run.wrong |= not right
            cells = [f"{us:10.1f}" for us in (found[name] if run.on_gpus else found[name][:1])]
            run.say(" ".join([f"{nbytes:>10} {name:<12}", *cells, "" if right else "WRONG"]))

    def _series(self, made: dict[str, Any], plan: Schedule, mode: str, run: Run) -> dict[str, Series]:
        return {name: Series(call, 1, plan, mode, run.device) for name, (call, _) in made.items()}

    def end(self, run: Run) -> None:
        run.say(*weft.process_group(self._groups["weft"]).calls())


SUITE = ProcessGroup()
