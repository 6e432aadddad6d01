"""Eager layers that call torch's ops by name."""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.distributed as dist
import weft
from parts import has_torch_symm
from suite import Run, Suite, numbers
from timer import Call, Schedule, Series, over_ranks, same_head_start
from torch import Tensor

ROUNDS = 15
WRONG = 0.02  # of bfloat16 or float32, relative to the norm


def _layer(ops: object, group: str, x: Tensor, up: Tensor, down: Tensor) -> Call:
    gather, scatter = ops.fused_all_gather_matmul, ops.fused_matmul_reduce_scatter  # type: ignore[attr-defined]

    def call(_: int) -> list[Tensor]:
        _, (h,) = gather(x, [up], 0, group, return_A=False)
        return [scatter(h.relu_(), down, "sum", 0, group)]

    return call


def _result(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """In float64."""
    whole = x.new_empty(dist.get_world_size() * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(whole, x)
    product = (whole.double() @ up.double()).relu() @ down.double()
    dist.all_reduce(product)
    return product.chunk(dist.get_world_size())[dist.get_rank()]


class Installed(Suite):
    """Eager layers that call ``torch.ops.symm_mem`` by name: torch's ops, weft in their place, and weft's own.

    A layer is an all-gather + matmul, a ReLU and a matmul + reduce-scatter, as SGLang and torchtitan call them. Each
    line has microseconds of a layer: of the host, which launches a round without waiting, and of the device, after a
    sleep that lets the host run ahead; the median of the rounds, the slowest rank's. Results are compared with float64.
    Between CPU ranks, where torch has no ops, one clock measures both.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        sizes = (128, 512, 2048, 8192)
        parser.add_argument("--m-sizes", type=numbers, default=sizes, help="rows of all ranks, by commas")
        parser.add_argument("--hidden", type=int, default=4096)
        parser.add_argument("--intermediate", type=int, default=14336)

    def rows(self, given: argparse.Namespace) -> tuple[int, ...]:
        sizes: tuple[int, ...] = given.m_sizes
        return sizes

    def begin(self, run: Run) -> None:
        has_torch_symm(run.group.group_name, run.device)
        run.say(f"{'rows':>6} {'contender':<18} {'host us':>9} {'device us':>10}")

    @torch.no_grad()
    def measure(self, row: int, run: Run) -> None:
        hidden, dtype = run.given.hidden, torch.bfloat16 if run.on_gpus else torch.float32
        sizes = (row // run.world, hidden), (hidden, run.given.intermediate // run.world)
        x, up = (torch.randn(*shape, device=run.device).to(dtype) for shape in sizes)
        down = (torch.randn(*reversed(sizes[1]), device=run.device) / hidden**0.5).to(dtype)
        want, name = _result(x, up, down), run.group.group_name
        ways = {"torch": torch.ops.symm_mem, "torch's, on weft": torch.ops.symm_mem, "weft": weft}
        if not run.on_gpus:
            del ways["torch"]
        series, plan = {}, Schedule(20)
        for who, ops in ways.items():
            self._install(who)
            series[who] = Series(_layer(ops, name, x, up, down), 1, plan, "eager", run.device)
            series[who].poison()
            series[who].run()
            error = ((series[who].last[0].double() - want).norm() / want.norm()).item()
            run.wrong |= not error < WRONG
            run.say(*([] if error < WRONG else [f"{who}: WRONG, relative error {error}"]))
        same_head_start(list(series.values()), run.device)
        times: dict[str, list[float]] = {who: [] for who in series}
        for _ in range(ROUNDS + 1):
            for who, one in series.items():
                self._install(who)
                times[who].append(one.time())
        for who, one in series.items():
            host, device = (median(over_ranks(us[1:], run.device)) for us in (one.host_rounds, times[who]))
            run.say(f"{row:6} {who:<18} {host:9.1f} {device:10.1f}")

    def _install(self, who: str) -> None:
        (weft.drop_in.uninstall if who == "torch" else weft.install)()

    def end(self, run: Run) -> None:
        run.say(*weft.drop_in.installed_calls())


SUITE = Installed()
