"""Large all-reduces by the GPU's copy engines: two_shot's three steps, chunk by chunk, and next to no SM.

Every rank owns a part of the result, cut into chunks. On rank r, half h, use e, for each chunk c:

1. copy streams: chunk c of x's part q goes into slot r of rank q's half, then e into flag c of rank r there;
2. current stream: ``reduce_chunk`` waits for the peers' flags c and writes chunk c of the own part to out;
3. copy streams, behind that: it goes into slot r of every peer's results, then e into flag ``chunks + c``;

and at last ``collect`` on the current stream waits for those flags of the peers, copies their parts to out, and
ends the use. Engines copy in larger packets than multiprocessors store: 380 GB/s over NVLink where those end at 325.

The gate in front waits until every peer's half is free and counts TICKET up to e; a flag is a 4-byte copy of that
word, so a captured graph goes on counting. A stream keeps its order: data is there before its flag. Who overwrites
what: a chunk of out is written by ``collect`` after its owner has reduced it, so after x's chunk has left; out may
be x.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from cuda.bindings import driver

from ...symm_mem.backends.vmm import check
from ...symm_mem.workspace import Layout, Workspace
from ..device.gate import gate
from ..device.program import Function, Program, Watch
from ..device.push import up
from .configs import Config
from .cuda_kernel import DTYPES, AllReduce

SOURCE = Path(__file__).with_name("copies.cu")
PIECE = 64 << 20  #: bytes of the input that travel in one use of a half
_GRAIN = 4096  # elements: what parts and chunks are multiples of
_THREADS = 512
_REDUCE_BLOCKS, _COLLECT_BLOCKS = 132, 64


class _Params(ctypes.Structure):
    """The twin of ``Params`` in copies.cu."""

    _fields_ = (
        ("watch", Watch),
        *((name, ctypes.c_uint64) for name in ("span", "x", "out", "slots", "numel", "part", "chunk")),
        *((name, ctypes.c_uint32) for name in ("chunks", "which", "flags", "flags_per_rank")),
        *((name, ctypes.c_uint32) for name in ("ticket", "epoch", "left", "done")),
    )


@cache
def program(world_size: int, rank: int, dtype: torch.dtype, reduce_op: str) -> Program:
    """copies.cu for one rank, dtype and operation."""
    defines: dict[str, str | int] = {"WORLD_SIZE": world_size, "RANK": rank}
    defines |= {"DTYPE": DTYPES[dtype], "REDUCE": reduce_op}
    return Program(SOURCE, defines=defines)


def parts(numel: int, world_size: int, chunks: int) -> tuple[int, int]:
    """Elements of a part and of a chunk; the last ones may have fewer."""
    part = up(-(-numel // world_size), _GRAIN)
    return part, up(-(-part // chunks), _GRAIN)


def chunk_range(owner: int, which: int, numel: int, part: int, chunk: int) -> tuple[int, int]:
    """(first element, elements) of a chunk of owner's part."""
    first = owner * part + min(which * chunk, part)
    return first, max(0, min(owner * part + min((which + 1) * chunk, part), numel) - first)


def needs(nbytes: int, itemsize: int, world_size: int, config: Config) -> tuple[int, int]:
    """Bytes of a half, and flags for each rank."""
    part, _ = parts(min(nbytes, PIECE) // itemsize, world_size, config.chunks)
    return 2 * world_size * part * itemsize, 2 * config.chunks


class Streams:
    """The copy streams of a workspace, and the events that order them with the current stream."""

    def __init__(self, streams: int, chunks: int) -> None:
        flags = int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)
        _, highest = check(driver.cuCtxGetStreamPriorityRange())
        timing = int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        self.handles = [int(check(driver.cuStreamCreateWithPriority(flags, highest))) for _ in range(streams)]
        self.begin, *self.reduced = (int(check(driver.cuEventCreate(timing))) for _ in range(1 + chunks))
        self.ends = [int(check(driver.cuEventCreate(timing))) for _ in range(streams)]


def _streams(workspace: Workspace[Layout], streams: int, chunks: int) -> Streams:
    """Those that a workspace keeps."""
    key = ("copies", streams, chunks)
    if key not in workspace.copy_streams:
        workspace.copy_streams[key] = Streams(streams, chunks)
    kept: Streams = workspace.copy_streams[key]
    return kept


class CopyEngineAllReduce:
    """This op on one workspace, number of elements, dtype and operation: prepared once, launched often.

    Args:
        workspace: with room for ``needs``; the same call site on every rank.
        numel: elements of x, 1 or more.
        reduce_op: "sum", "avg", "max" or "min".
        config: of form copy_engine, the same on every rank.
    """

    def __init__(
        self, workspace: Workspace[Layout], numel: int, dtype: torch.dtype, reduce_op: str, config: Config
    ) -> None:
        self._numel, self._dtype, self._chunks, self._blocks = numel, dtype, config.chunks, config.blocks
        half_bytes, flags = needs(numel * dtype.itemsize, dtype.itemsize, workspace.world_size, config)
        layout = workspace.layout
        if layout.half_bytes < half_bytes or layout.flags_per_rank < flags:
            raise ValueError(f"workspace: {layout} is too small for {numel} elements of {dtype}")
        self.workspace = workspace
        self._streams = _streams(workspace, config.streams, config.chunks)
        kernels = program(workspace.world_size, workspace.rank, dtype, reduce_op)
        self._reduce: Function = kernels.function("reduce_chunk")
        self._collect: Function = kernels.function("collect")

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        """``out`` = what all ranks' ``x`` make together, the same bits on every rank: in float32, in rank order.

        Safe to capture in a CUDA graph. The current device must be that of the tensors.

        Args:
            x, out: addresses of contiguous tensors, multiples of 16; out may be x.
            timeout_ns: nanoseconds until a wait for a peer expires, see the workspace's record.
            stream: a CUstream as an integer.

        Raises:
            RuntimeError: something cannot be launched, in the driver's words.
        """
        size = self._dtype.itemsize
        for start in range(0, self._numel, PIECE // size):
            count = min(PIECE // size, self._numel - start)
            self._piece(x + start * size, out + start * size, count, timeout_ns, stream)

    def _piece(self, x: int, out: int, numel: int, timeout_ns: int, stream: int) -> None:
        w, chunks, streams = self.workspace, self._chunks, self._streams
        layout, half, size = w.layout, w.next_half(), self._dtype.itemsize
        part, chunk = parts(numel, w.world_size, chunks)
        slots = w.address + layout.half(half)
        flags = layout.flags(half)
        params = _Params(
            Watch.of(w, timeout_ns),
            w.span,
            *(x, out, slots, numel, part, chunk, chunks, 0),
            *(flags, layout.flags_per_rank),
            *(Layout.TICKET + half, Layout.EPOCH + half, Layout.LEFT + half, layout.done(half)),
        )
        ticket = w.address + 4 * (Layout.TICKET + half)
        flag = w.address + 4 * (flags + w.rank * layout.flags_per_rank)
        in_turn = [(step, (w.rank + step) % w.world_size) for step in range(1, w.world_size)]

        def send(source: int, slot: int, count: int, i: int, peer: int, handle: int) -> None:
            there = (peer - w.rank) * w.span
            if count:
                check(driver.cuMemcpyDtoDAsync(slot + there, source, count * size, handle))
            check(driver.cuMemcpyDtoDAsync(flag + 4 * i + there, ticket, 4, handle))

        gate(w, half, timeout_ns, stream)
        check(driver.cuEventRecord(streams.begin, stream))
        for handle in streams.handles:
            check(driver.cuStreamWaitEvent(handle, streams.begin, 0))
        for c in range(chunks):
            for step, peer in in_turn:
                first, count = chunk_range(peer, c, numel, part, chunk)
                slot = slots + (w.rank * part + c * chunk) * size
                send(x + first * size, slot, count, c, peer, streams.handles[step % len(streams.handles)])
        for c in range(chunks):
            params.which = c
            self._reduce.launch(min(_REDUCE_BLOCKS, self._blocks), _THREADS, params, stream)
            check(driver.cuEventRecord(streams.reduced[c], stream))
            for handle in streams.handles:
                check(driver.cuStreamWaitEvent(handle, streams.reduced[c], 0))
            first, count = chunk_range(w.rank, c, numel, part, chunk)
            slot = slots + (w.world_size * part + first) * size
            for step, peer in in_turn:
                handle = streams.handles[step % len(streams.handles)]
                send(out + first * size, slot, count, chunks + c, peer, handle)
        self._collect.launch(min(_COLLECT_BLOCKS, self._blocks), _THREADS, params, stream)
        for handle, end in zip(streams.handles, streams.ends, strict=True):
            check(driver.cuEventRecord(end, handle))
            check(driver.cuStreamWaitEvent(stream, end, 0))


class SideBySide:
    """The front of x by kernels that push, the rest by copy engines at the same time, which are slow to start.

    Args:
        pushes, copies: on workspaces of their own; together they have x's elements, in this order.
    """

    def __init__(self, pushes: AllReduce, copies: CopyEngineAllReduce) -> None:
        self._pushes, self._copies = pushes, copies
        self._front = pushes.numel * pushes.dtype.itemsize
        side = _streams(copies.workspace, 1, 0)
        (self._side,), self._begin, (self._end,) = side.handles, side.begin, side.ends

    def launch(self, x: int, out: int, timeout_ns: int, stream: int) -> None:
        """As ``CopyEngineAllReduce.launch``."""
        check(driver.cuEventRecord(self._begin, stream))
        check(driver.cuStreamWaitEvent(self._side, self._begin, 0))
        self._copies.launch(x + self._front, out + self._front, timeout_ns, self._side)
        self._pushes.launch(x, out, timeout_ns, stream)
        check(driver.cuEventRecord(self._end, self._side))
        check(driver.cuStreamWaitEvent(stream, self._end, 0))


def front(numel: int, config: Config) -> int:
    """Elements in front that kernels push."""
    return numel * (100 - config.copied) // 100 // _GRAIN * _GRAIN
