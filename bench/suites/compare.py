"""This checkout's ops beside another one's."""

from __future__ import annotations

import argparse
import json
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from machine import ROOT
from parts import random_tensor
from registry import CPU_SCALE, LAYERS
from suite import Run, Suite, numbers, words
from timer import CYCLES_PER_US, Schedule, Series, over_ranks
from torch import Tensor

GATHERS = "all_gather_matmul", "all_gather_matmul_A"  # the second one returns the gathered A
SCATTERS = "matmul_reduce_scatter", "matmul_reduce_scatter_residual"
COLLECTIVES = "all_reduce", "all_gather", "reduce_scatter"
NORMS = "all_reduce_rms_norm", "all_reduce_layer_norm"
FLOAT8 = "float8_all_gather_matmul", "float8_matmul_reduce_scatter"
OPS = (*GATHERS, *SCATTERS, "matmul_all_reduce", *COLLECTIVES, *NORMS, *FLOAT8)
SETS = 3  # of operands
GATHERED = ("llama8b.qkv", "llama8b.upgate")  # layers
REDUCED = ("llama8b.o", "llama8b.down")
HIDDEN = 4096

OpCall = Callable[[int], Tensor]
CompareRow = tuple[str, Callable[[torch.device], OpCall]]


def _runs_of(op: str, m: int, layer: tuple[int, int], device: torch.device) -> OpCall:
    """Call i of an op, on set i of operands. ``layer``: K and N of the whole one."""
    import weft.fused_ops as ops

    world, group, (k, n) = dist.get_world_size(), dist.group.WORLD, layer
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def sets(*shape: int) -> list[Tensor]:
        return [random_tensor(shape, dtype, device) for _ in range(SETS)]

    if op in (*GATHERS, FLOAT8[0]):
        shards, (B,) = sets(m // world, k), sets(k, n // world)[:1]
        returned = op == GATHERS[1]
        of = ops.float8_all_gather_matmul if op in FLOAT8 else ops.fused_all_gather_matmul
        gathered = partial(of, gather_dim=0, group=group, return_A=returned)
        return lambda i: gathered(shards[i], [B])[1][0]
    if op in (*SCATTERS, "matmul_all_reduce", FLOAT8[1]):
        xs, (B,) = sets(m, k // world), sets(k // world, n)[:1]
        if op in FLOAT8:
            return lambda i: ops.float8_matmul_reduce_scatter(xs[i], B, "sum", 0, group)
        if op == "matmul_all_reduce":
            return lambda i: ops.fused_matmul_all_reduce(xs[i], B, "sum", group)
        added: list[dict[str, Any]] = (
            [{"residual": r} for r in sets(m // world, n)] if op == SCATTERS[1] else [{}] * SETS
        )
        return lambda i: ops.fused_matmul_reduce_scatter(xs[i], B, "sum", 0, group, **added[i])
    xs, residual, weight = sets(m, n), sets(m, n)[0], torch.ones(n, device=device, dtype=dtype)
    if op == "all_reduce":
        return lambda i: ops.one_shot_all_reduce(xs[i], "sum", group)
    if op == "all_gather":
        return lambda i: ops.one_shot_all_gather(xs[i], 0, group)
    if op == "reduce_scatter":
        return lambda i: ops.one_shot_reduce_scatter(xs[i], "sum", 0, group)
    if op == "all_reduce_layer_norm":
        bias = torch.zeros_like(weight)  # not the weight: guards of tensors pass none that is there twice
        return lambda i: ops.fused_all_reduce_layer_norm(xs[i], residual, weight, bias, 1e-6, group)[0]
    return lambda i: ops.fused_all_reduce_rms_norm(xs[i], residual, weight, 1e-6, group)[0]


def _rows(ops: Sequence[str], m_sizes: Sequence[int], on: str) -> Iterator[CompareRow]:
    small = CPU_SCALE if on == "cpu" else 1
    for op in ops:
        layers = {"": (0, HIDDEN)}
        if "matmul" in op:
            gathers = op in (*GATHERS, FLOAT8[0])
            of, names = (GATHERS[0], GATHERED) if gathers else (SCATTERS[0], REDUCED)
            layers = {name: LAYERS[of][name] for name in names}
        for name, (k, n) in layers.items():
            for m in m_sizes:
                row = " ".join(filter(None, (op, name, str(m))))
                yield row, partial(_runs_of, op, m, (k // small, n // small))


def _time_of(call: OpCall, device: torch.device) -> float:
    series, plan = (15, Schedule(8)) if device.type == "cuda" else (3, Schedule(2, 1))
    timed = Series(lambda i: [call(i)], SETS, plan, "graph" if device.type == "cuda" else "eager", device)
    return median(over_ranks([timed.time() for _ in range(series)], device))


def _host_time_of(call: OpCall, device: torch.device) -> float:
    """The device sleeps while the host launches: a full queue would have the host wait for the device."""
    series, calls = (16, 50) if device.type == "cuda" else (4, 5)
    found = []
    for _ in range(series):
        if device.type == "cuda":
            dist.all_reduce(torch.zeros(1, device=device))
            torch.cuda._sleep(8_000 * CYCLES_PER_US)
        start_s = time.perf_counter()
        for i in range(calls):
            call(i % SETS)
        found.append((time.perf_counter() - start_s) / calls * 1e6)
        if device.type == "cuda":
            torch.cuda.synchronize()
    return median(over_ranks(found[1:], device))


def checkout(other: str, folder: Path) -> Path:
    """Of a folder itself; a commit's files are unpacked into ``folder``.

    Raises:
        ValueError: it is neither.
    """
    if Path(other, "fused_ops").is_dir():
        return Path(other).resolve()
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", other], check=False, capture_output=True)
    if packed.returncode:
        raise ValueError(
            f"other: is {other!r}, must be a checkout or a commit: {packed.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=BytesIO(packed.stdout)) as files:
        files.extractall(folder, filter="data")
    return folder


def _line(name: str, before: list[float | None], now: list[float | None]) -> str:
    cells, lowest = [], []
    for runs in (before, now):
        there = [us for us in runs if us is not None]
        cells.append(f"{min(there):.1f} to {max(there):.1f}" if there else "-")
        lowest += [min(there)] if there else []
    ratio = f"{lowest[1] / lowest[0]:.3f}" if len(lowest) == 2 else "-"
    return f"| {name} | {cells[0]} | {cells[1]} | {ratio} |"


class Compare(Suite):
    """This checkout's ops beside those of another one: a commit of the repository, or a folder.

    The two run alternately, --runs times each, in their own processes, on the same GPUs (else on two CPU ranks). Prints
    a markdown table: microseconds of a call, the lowest and highest of the runs of each, and the ratio of the lowest.
    "-": that checkout cannot. It uses no more of weft than its public ops.

    A row is an op, a layer of Llama 8B and M; the time is the median of 15 series of 8 calls in a CUDA graph (between
    CPU ranks 3 of 2 eager calls of a small layer) with operands alternately, of the slowest rank. With --host it is the
    host's, of 15 series of 50 eager calls whose device is asleep meanwhile.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("other", help="a commit, or a folder")
        parser.add_argument("--runs", type=int, default=2)
        parser.add_argument("--ops", type=words, default=OPS, help=f"of {', '.join(OPS)}; by commas")
        parser.add_argument("--m-sizes", type=numbers, default=(), help="by commas")
        parser.add_argument("--host", action="store_true", help="the host's time of eager calls")
        parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)  # of one run on its ranks

    def rows(self, given: argparse.Namespace) -> list[CompareRow]:
        if unknown := [op for op in given.ops if op not in OPS]:
            raise ValueError(f"--ops: {unknown} is not among {OPS}")
        sizes = given.m_sizes or ((1024, 2048, 4096, 8192) if given.device == "cuda" else (32,))
        return list(_rows(given.ops, sizes, given.device))

    def start(self, given: argparse.Namespace, arguments: list[str]) -> int:
        with tempfile.TemporaryDirectory() as path:
            folder = Path(path)
            roots = checkout(given.other, folder / "other"), ROOT
            runs: list[list[dict[str, float | None]]] = [[], []]
            for i in range(2 * given.runs):
                (folder / str(i)).mkdir()
                (folder / str(i) / "weft").symlink_to(roots[i % 2])
                found = folder / f"{i}.json"
                environment = {"PYTHONPATH": str(folder / str(i))}
                if code := self.launch(given, [*arguments, "--out", str(found)], environment):
                    return code
                runs[i % 2].append(json.loads(found.read_text()))
        print(f"| | {given.other} | this checkout | ratio |\n|---|---|---|---|")
        for name in runs[1][0]:
            print(_line(name, *([times[name] for times in each] for each in runs)))
        return 0

    def begin(self, run: Run) -> None:
        self._found: dict[str, float | None] = {}

    def measure(self, row: CompareRow, run: Run) -> None:
        name, made = row
        try:
            self._found[name] = (_host_time_of if run.given.host else _time_of)(made(run.device), run.device)
        except (AttributeError, TypeError):  # an op or an argument that this weft does not have: on all ranks
            self._found[name] = None

    def end(self, run: Run) -> None:
        if run.rank == 0:
            run.given.out.write_text(json.dumps(self._found))


SUITE = Compare()
