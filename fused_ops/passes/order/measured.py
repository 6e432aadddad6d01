"""The table of costs of the machine: measured once by all ranks together, agreed by them, and kept on disk.

Rank 0 alone reads and writes the file, and each time is that of the slowest rank.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from ....kernels.device.tuning.measured import median_us, slowest_times
from ....symm_mem import Group, resolve_group
from ....symm_mem.heap.registry import default_device, get_heap
from .costs import TABLES, CostTable, table_of, use_table
from .transports import transport_of_group

_ROUNDS = 5
_LEAST, _MOST = 1.0, 4.0  # what is believed of contention


@dataclass(frozen=True)
class _Sizes:
    """What is measured: a product of [n, n] twice, a copy of so many bytes, and gathers to so many on each rank."""

    n: int
    copied: int
    gathered: int
    dtype: torch.dtype


_SIZES = {
    "cuda": _Sizes(4096, 256 << 20, 64 << 20, torch.bfloat16),
    "cpu": _Sizes(256, 4 << 20, 1 << 20, torch.float32),
}


def measure_costs(group: Group = None) -> CostTable:
    """Measures what ``FusionPass(reorder=...)`` and its buckets estimate with, and has this process use it. Collective.

    >>> from weft.fused_ops import measure_costs
    >>> table = measure_costs()
    >>> table.measured, table.contention >= 1
    (True, True)

    All ranks measure at the same time: a matmul, a copy, all-gathers of the group's backend, and a matmul beside one.
    The slowest rank's times count, so that all ranks have the same table and choose alike. What was measured is kept
    in the folder of compiled kernels, by GPU, number of ranks and version; who comes again reads it. It takes about a
    second, and half a GiB on CUDA.

    To be called by all ranks of the program before they compile, of the group that has all of them: graphs that were
    compiled before stay as they are. Without it the estimates are constants.

    Args:
        group: over which collectives are measured: its transport's rate is what changes. None for all ranks.

    Returns:
        the table: rates per microsecond, by transport, and how much longer a matmul takes beside a collective.

    Raises:
        ValueError: the group has one rank, or does not exist.
        WeftError: the ranks cannot meet (they share no host), a rank could not measure, or captures a CUDA graph.
    """
    pg = resolve_group(group)
    if pg.size() == 1:
        raise ValueError("group: has one rank, must have two or more")
    device, transport = default_device(pg), transport_of_group(pg.group_name)
    heap = get_heap(pg, device)
    kind = f"costs of {transport}: {_SIZES[device.type]}"
    times = slowest_times(heap, kind, lambda: _times(pg, device))
    table = _table_from(times, device.type, transport, pg.size())
    use_table(device.type, table)
    return table


def _times(pg: ProcessGroup, device: torch.device) -> dict[str, float]:
    """Microseconds of each, of this rank."""
    sizes, world = _SIZES[device.type], pg.size()
    a = torch.ones(sizes.n, sizes.n, dtype=sizes.dtype, device=device)
    product, source = torch.empty_like(a), torch.zeros(sizes.copied, dtype=torch.uint8, device=device)
    copy, little = torch.empty_like(source), torch.zeros(16, device=device)
    shard = torch.zeros(sizes.gathered // world, dtype=torch.uint8, device=device)
    whole, few = torch.empty(shard.numel() * world, dtype=torch.uint8, device=device), shard[:16]

    def gather(x: torch.Tensor) -> Callable[[], Any]:
        return lambda: dist.all_gather_into_tensor(whole[: x.numel() * world], x, group=pg)

    launches: dict[str, Callable[[], Any]] = {
        "product": lambda: torch.mm(a, a, out=product),
        "copy": lambda: copy.copy_(source),
        "launch": lambda: little.add_(1),
        "small": gather(few),
        "large": gather(shard),
    }
    measure = median_us if device.type == "cuda" else _wall_us
    times = dict(zip(launches, measure([*launches.values()], device), strict=True))
    count = max(1, round(times["large"] / times["product"]))
    beside = []
    for _ in range(_ROUNDS):
        dist.barrier(pg)
        work = dist.all_gather_into_tensor(whole, shard, group=pg, async_op=True)
        beside.append(_elapsed([launches["product"]] * count, device))
        work.wait()
    ratio = statistics.median(beside) / (count * times["product"])
    return {name: max(us, 1e-3) for name, us in times.items()} | {"contention": max(ratio, 1e-3)}


def _elapsed(launches: list[Callable[[], Any]], device: torch.device) -> float:
    """Microseconds of all of them, one after the other."""
    if device.type == "cuda":
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        marks[0].record()
        for launch in launches:
            launch()
        marks[1].record()
        marks[1].synchronize()
        return marks[0].elapsed_time(marks[1]) * 1000
    begin = time.perf_counter()
    for launch in launches:
        launch()
    return (time.perf_counter() - begin) * 1e6


def _wall_us(launches: list[Callable[[], Any]], device: torch.device) -> list[float]:
    rounds = [[_elapsed([launch], device) for launch in launches] for _ in range(_ROUNDS + 1)]
    return [statistics.median(times) for times in zip(*rounds[1:], strict=True)]


def _table_from(times: dict[str, float], device: str, transport: str, world: int) -> CostTable:
    """The rates that give these times, in place of those of the table now."""
    sizes, before = _SIZES[device], table_of(device)
    rate = sizes.n**3 / _beyond(times["product"], times["launch"])
    sent = (sizes.gathered // world) * (world - 1)
    links = dict(before.links) | {transport: sent / _beyond(times["large"], times["small"])}
    return replace(
        TABLES[device],
        multiply_adds=rate * (4 if sizes.dtype == torch.float32 else 1),
        memory=2 * sizes.copied / _beyond(times["copy"], times["launch"]),
        links=tuple(sorted(links.items())),
        latency=times["small"],
        launch=times["launch"],
        contention=min(_MOST, max(_LEAST, times["contention"])),
        measured=True,
    )


def _beyond(whole: float, part: float) -> float:
    """The time that grows with size; never so little that a rate is out of the question."""
    return max(whole - part, whole / 10)
