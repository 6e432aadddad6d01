"""All-gather + matmul of one rank alone, on a GPU that stands for one of several: where there are too few of them.

torchrun --nproc-per-node 4 bench/alone.py --layers llama70b.qkv,llama8b.qkv --m-sizes 1024,2048

The ranks share one GPU, and rank 0 alone launches. The rows of its peers lie in its memory already. A second kernel,
on a multiprocessor that the op does not get, plays the peers (announce.cu): when rank 0 has set a flag at one of them,
they set theirs for the same piece, as much later as a link is long, and no earlier than links could have brought it.
What rank 0 sends goes to the same GPU's memory, at the pace that it keeps on links. So what tiles, waves of them, the
order of rows and the way to a piece's flag cost shows. What does not: fences that wait for links, links that several
ranks share, and ranks that begin late. Each line has the likeliest candidates that send by themselves (not the gather
in one shot, which the op may take instead), of each tile one with which all blocks send and one with which some do:
microseconds, and in brackets what configs.py estimates. Results are compared with float64 once; a wrong one ends the
run.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median

import machine
import torch
import torch.distributed as dist
from contenders import LINK_BYTES_PER_US
from parts import divisible, random_tensor, sets_of
from registry import LAST_DIMENSION, SPLITS, Row, rows
from torch import Tensor
from weft import symm_mem
from weft.kernels.all_gather_matmul.configs import PushConfig, push_layout, push_ranked, varied
from weft.kernels.all_gather_matmul.cuda_kernel import AllGatherMatmulPush
from weft.kernels.device.program import Program
from weft.symm_mem import Workspace
from weft.symm_mem.fault import WORD
from weft.symm_mem.workspace import Layout

# Bytes a nanosecond that all peers together send to a rank, and nanoseconds on the way, as between H200s.
RATE_OF_TWO, RATE, TRIP = 335.0, 294.0, 1000
CALLS, ROUNDS = 6, 9  # the first call of a round does not count
AHEAD = 1_500_000  # cycles, for which the device sleeps while the host launches a round
TIMEOUT_NS = 2_000_000_000
FREE = 2  # multiprocessors for announce.cu: the op takes them in pairs


class _Params(ctypes.Structure):
    """The twin of ``Params`` in announce.cu."""

    _fields_ = (
        ("flags", ctypes.c_uint64),
        ("told", ctypes.c_uint64),
        ("pieces", ctypes.c_uint64),
        ("due", ctypes.c_uint64),
        ("use", ctypes.c_uint64),
        ("count", ctypes.c_int32),
        ("flags_per_rank", ctypes.c_int32),
        ("world", ctypes.c_int32),
        ("trip", ctypes.c_int32),
        ("patience", ctypes.c_uint64),
    )


def program() -> Program:
    return Program(Path(__file__).parent / "announce.cu")


def announcements(config: PushConfig, m: int, k: int, world_size: int) -> list[tuple[int, int]]:
    """(flag, nanoseconds that links take up to it) of each piece that one peer sends, in the order of kernel.cu.

    Args:
        m, k: of a shard.
    """
    height, width = config.piece_rows, config.piece_columns
    down, across = config.tile.block_m // height, config.unit_columns // width
    tile_rows, units = -(-m // config.tile.block_m), -(-k // config.unit_columns)
    rate, sent, found = RATE_OF_TWO if world_size == 2 else RATE, 0, []
    for first in range(0, tile_rows, config.group):
        for unit in range(units):
            for tile_row in range(first, min(first + config.group, tile_rows)):
                for piece in range(down * across):
                    row = tile_row * config.tile.block_m + piece // across * height
                    column = unit * config.unit_columns + piece % across * width
                    if row < m and column < k:
                        sent += (world_size - 1) * min(height, m - row) * min(width, k - column) * 2
                        flag = (tile_row * units + unit) * down * across + piece
                        found.append((flag, round(sent / rate)))
    return found


class Alone:
    """A candidate on rank 0 with operands of its own."""

    def __init__(
        self,
        workspace: Workspace[Layout],
        config: PushConfig,
        peers: Tensor,
        shards: list[Tensor],
        weights: list[list[Tensor]],
        outs: list[list[Tensor]],
        num_sms: int,
    ) -> None:
        (m, k), world_size = shards[0].shape, workspace.world_size
        self._workspace = workspace
        self._addresses = [
            (a.data_ptr(), [b.data_ptr() for b in bs], [c.data_ptr() for c in cs])
            for a, bs, cs in zip(shards, weights, outs, strict=True)
        ]
        for half in (0, 1):
            workspace.half(0, half, tuple(peers.shape), peers.dtype).copy_(peers)
        self._kernel = AllGatherMatmulPush(workspace, shards[0], weights[0], config, num_sms=num_sms)
        self._half, self._uses = 0, [0, 0]
        self._side = torch.cuda.Stream()
        self._use = torch.zeros(2, dtype=torch.int32, device=peers.device)
        pieces = torch.tensor(announcements(config, m, k, world_size)).int().to(peers.device)
        self._pieces, self._due = (x.contiguous() for x in pieces.unbind(1))
        announce = program().function("announce")
        self._announce = [announce.bound(1, 1024, self._params(half), 0) for half in (0, 1)]

    def _params(self, half: int) -> _Params:
        w, layout = self._workspace, self._workspace.layout
        flags = w.address + layout.flags(half) * WORD
        told = flags + w.span  # rank 0's are the first ones of rank 1's
        given = (x.data_ptr() for x in (self._pieces, self._due, self._use[half:]))
        counts = self._pieces.numel(), layout.flags_per_rank, w.world_size
        return _Params(flags, told, *given, *counts, TRIP, TIMEOUT_NS)

    def prepare(self) -> None:
        """Of the next call: peers have left the half, what they send in this use is still to come."""
        layout, words = self._workspace.layout, self._workspace.words
        self._half ^= 1
        half, size = self._half, self._workspace.world_size
        self._uses[half] += 1
        use = self._uses[half]
        self._use[half].fill_(use)
        words[layout.flags(half) : layout.flags(half) + size * layout.flags_per_rank].fill_(use - 1)
        words[layout.done(half) : layout.done(half) + size].fill_(use - 1)
        self._side.wait_stream(torch.cuda.current_stream())
        self._announce[half](self._side.cuda_stream)

    def call(self, i: int) -> None:
        stream = torch.cuda.current_stream().cuda_stream
        self._kernel.launch(self._half, *self._addresses[i], True, True, TIMEOUT_NS, stream)

    def finish(self) -> None:
        torch.cuda.current_stream().wait_stream(self._side)

    def raise_if_broken(self) -> None:
        self._workspace.raise_if_broken("all_gather_matmul")


def timed(
    prepare: Callable[[], None], call: Callable[[int], None], finish: Callable[[], None], sets: int
) -> float:
    """Microseconds of a call: the median of a round."""
    marks = []
    torch.cuda._sleep(AHEAD)
    for i in range(CALLS):
        prepare()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call(i % sets)
        end.record()
        finish()
        marks.append((begin, end))
    torch.cuda.synchronize()
    return median(begin.elapsed_time(end) * 1e3 for begin, end in marks[1:])


def measure(row: Row, count: int, device: torch.device) -> str | None:
    """A line of the table; None on the ranks that only lend their memory."""
    assert row.K is not None
    rank, world = dist.get_rank(), dist.get_world_size()
    m, k, n = divisible(row.M, world, "M", row), row.K, divisible(row.N, world, "N", row)
    split = SPLITS.get(row.name, (1,))
    ns = [n * share // sum(split) for share in split]
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count - FREE
    found = varied(push_ranked(m, tuple(ns), k, world, num_sms))[:count]
    heap = symm_mem.heap(None, device)
    rooms = [Workspace(heap, push_layout(m, k, world, c), f"{row.id} {i}") for i, (_, c) in enumerate(found)]
    dist.barrier()
    line = None
    if rank == 0:
        sets = sets_of((m * k + k * n) * row.dtype.itemsize, device)
        shards = [random_tensor((m, k), row.dtype, device) for _ in range(sets)]
        weights = [[random_tensor((k, c), row.dtype, device) / k**0.5 for c in ns] for _ in range(sets)]
        outs = [[torch.empty(world * m, c, dtype=row.dtype, device=device) for c in ns] for _ in range(sets)]
        peers = random_tensor((world * m, k), row.dtype, device)
        alone = [
            Alone(room, c, peers, shards, weights, outs, num_sms)
            for room, (_, c) in zip(rooms, found, strict=True)
        ]
        gathered = torch.cat([shards[0], peers[m:]]).double()
        expected = [gathered @ b.double() for b in weights[0]]
        for one, (_, config) in zip(alone, found, strict=True):
            compare(one, outs[0], expected, f"{row.id} {config}")
        del gathered, expected

        def product(i: int) -> None:
            for b, out in zip(weights[i], outs[i], strict=True):
                torch.mm(peers, b, out=out)

        calls = [(lambda: None, product, lambda: None), *((o.prepare, o.call, o.finish) for o in alone)]
        times: list[list[float]] = [[] for _ in calls]
        for number in range(ROUNDS):
            for i in ((turn + number) % len(calls) for turn in range(len(calls))):
                times[i].append(timed(*calls[i], sets))
        for one in alone:
            one.raise_if_broken()
        us = [median(series) for series in times]
        link = (world - 1) * m * k * row.dtype.itemsize / LINK_BYTES_PER_US
        taken = [f"{text(c)}: {t:.1f} ({e:.0f})" for t, (e, c) in zip(us[1:], found, strict=True)]
        line = f"{row.name} M={row.M}: cuBLAS {us[0]:.1f}, links {link:.1f} | {' | '.join(taken)}"
    dist.barrier()
    return line


def compare(one: Alone, outs: list[Tensor], expected: list[Tensor], what: str) -> None:
    for out in outs:
        out.fill_(float("nan"))
    one.prepare()
    one.call(0)
    one.finish()
    torch.cuda.synchronize()
    one.raise_if_broken()
    for out, want in zip(outs, expected, strict=True):
        error = float((out.double() - want).norm() / want.norm())
        if not error < 0.004:  # of rounding to bfloat16: 0.002
            raise RuntimeError(f"{what}: relative error {error}")


def text(c: PushConfig) -> str:
    lead = f" lead {c.lead}" if c.lead else ""
    pieces = f"pieces {c.piece_rows} units {c.unit_columns}"
    return f"{c.tile.block_m}x{c.tile.block_n} senders {c.senders} group {c.group} {pieces}{lead}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", default="", help="parts of layers' names, separated by commas")
    parser.add_argument("--m-sizes", default="", help="rows of the whole left matrix, separated by commas")
    parser.add_argument("--candidates", type=int, default=6, help="of each row")
    given = parser.parse_args()
    layers = tuple(filter(None, given.layers.split(",")))
    sizes = tuple(int(size) for size in filter(None, given.m_sizes.split(",")))
    os.environ["WEFT_SHARE_GPUS"] = "1"  # before the heap is made
    dist.init_process_group("gloo")
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    if dist.get_rank() == 0:
        print(shlex.join(["bench/alone.py", *sys.argv[1:]]), machine.described("cuda", dist.get_world_size()))
    for row in rows("cuda", ("all_gather_matmul",), layers, sizes, modes=("graph",)):
        if row.name not in LAST_DIMENSION and (line := measure(row, given.candidates, device)) is not None:
            print(line, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
