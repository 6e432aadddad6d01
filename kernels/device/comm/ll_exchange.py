"""Workspaces of LL exchanges: the host's side of ll_exchange.cuh. Pure functions, no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TypeAlias

import torch

from ....symm_mem.switches import is_on
from ....symm_mem.workspace import Workspace
from ..jit import program
from ..jit.program import Program, WaitParams, fields

VECTOR = 16  #: bytes of a slot
#: What ll_exchange.cuh calls the dtypes whose numbers it reads.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The largest grid. An H100 or H200 has 132 SMs: while a kernel waits on so many, a matmul before what its peer
# waits for may find room on the others. 132 blocks are no faster (bench/NOTES.md).
BLOCKS = 128
ROUTE_BLOCKS = 8  #: of one cluster, that find experts' rows
THREADS = 512  #: the largest block, of those that send
WARP = 32


@cache
def dependent() -> bool:
    """Whether WEFT_PDL=1, asked once in a process: all-reduces and norms are launched while the kernel before them in
    their stream still runs, if that allows it (programmatic dependent launch).

    Raises:
        ValueError: WEFT_PDL is neither 0 nor 1.
    """
    return is_on("WEFT_PDL")


def exchange_program(source: Path, rank: int, defines: program.Defines) -> Program:
    """``source`` for one rank, with all else that it must know, as this process launches it."""
    return program.program_of(source, **defines, RANK=rank, DEPENDENT=int(dependent()))


def in_turn(of: Program) -> Program:
    """The same, with which a thread sends all that it has to one peer before it sends to the next one."""
    return program.program_of(of.path, **of.defines, IN_TURN=1)


class ExchangeSlots(ctypes.Structure):
    """The twin of ``weft::ExchangeSlots`` in ll_exchange.cuh."""

    _fields_ = (
        ("watch", WaitParams),
        ("span", ctypes.c_uint64),
        *fields(ctypes.c_uint32, "capacity epochs first emptied"),
    )


@dataclass(frozen=True)
class ExchangeLayout:
    """The layout of such a workspace, in 32-bit words from its start; all of it starts as zeros.

    ``[EPOCH of each block][slots: block, buffer, sender, index][EMPTIED: block, rank]``. Takes the place of
    ``symm_mem.layout.Layout`` in a ``Workspace``.

    Attributes: ``slots``: vectors that a block receives from one sender in one epoch. ``blocks``: of a launch, at most.
    """

    world_size: int
    slots: int
    blocks: int = BLOCKS

    EPOCHS = 0  #: + block: epochs of the block's slots that this rank has ended
    FIRST = EPOCHS + 192  #: the first slot

    def __post_init__(self) -> None:
        if self.world_size < 2:
            raise ValueError(f"world_size: is {self.world_size}, must be 2 or more")
        if self.slots < 2 * WARP or self.slots % (2 * WARP):
            raise ValueError(f"slots: is {self.slots}, must be a multiple of 64")
        check_grid(self.blocks)

    @property
    def words_of_block(self) -> int:
        """Of its slots."""
        return 2 * self.world_size * self.slots * VECTOR // 4

    @property
    def emptied(self) -> int:
        """+ block * W + rank: the last epoch of the block's slots that the rank has reset (credits.cuh)."""
        return self.FIRST + self.blocks * self.words_of_block

    @property
    def bytes(self) -> int:
        return 4 * (self.emptied + self.blocks * self.world_size)

    @property
    def words(self) -> int:
        """Words that must be zero before the first use: all."""
        return self.bytes // 4

    def holds(self, wanted: ExchangeLayout) -> bool:
        """Whether this layout has room for calls that need the other one."""
        return self.slots >= wanted.slots and self.blocks >= wanted.blocks

    def joined(self, other: ExchangeLayout) -> ExchangeLayout:
        """Room for the calls of both."""
        slots, blocks = max(self.slots, other.slots), max(self.blocks, other.blocks)
        return replace(self, slots=slots, blocks=blocks)

    def counter_of(self, word: int) -> int:
        """The block whose slots a word belongs to."""
        if word >= self.emptied:
            return (word - self.emptied) // self.world_size
        return (word - self.FIRST) // self.words_of_block

    def describe(self, word: int) -> str:
        """What a word is, for an error message about a wait for it."""
        if word < self.FIRST:
            return f"word {word}"
        if word >= self.emptied:
            block, rank = divmod(word - self.emptied, self.world_size)
            return f"last epoch that rank {rank} has emptied for block {block}"
        row, _ = divmod((word - self.FIRST) * 4 // VECTOR, self.slots)
        row, sender = divmod(row, self.world_size)
        return f"epoch of the data of rank {sender} for block {row // 2} (buffer {row % 2})"


ExchangeWorkspace: TypeAlias = Workspace[ExchangeLayout]


def slots_of(place: ExchangeWorkspace, block: int = 0) -> ExchangeSlots:
    """What kernels need of ``place``; each launch puts its deadline in. ``block``: whose slots block 0 of a kernel of
    one epoch takes."""
    layout, watch = place.layout, WaitParams.of(place, 0)
    first = layout.FIRST + block * layout.words_of_block
    return ExchangeSlots(watch, place.span, layout.slots, layout.EPOCHS + block, first, layout.emptied)


def check_grid(blocks: int, threads: int = THREADS) -> None:
    """Raises: ValueError: no launch may have so many."""
    if not 1 <= blocks <= BLOCKS:
        raise ValueError(f"blocks: is {blocks}, must be from 1 to {BLOCKS}")
    if threads % WARP or not WARP <= threads <= THREADS:
        raise ValueError(f"threads: is {threads}, must be a multiple of {WARP} up to {THREADS}")


def slots_for(count: int, blocks: int = BLOCKS, threads: int = THREADS) -> int:
    """Slots of each sender with which ``blocks`` of ``threads`` at most take so many vectors in one launch."""
    passes = -(-max(count, 1) // (blocks * threads))
    slots = passes * threads if passes > 1 else up(-(-count // blocks), WARP)
    return max(slots, WARP)


def exchange_grid(count: int, slots: int, blocks: int = BLOCKS, threads: int = THREADS) -> tuple[int, int]:
    """Blocks and threads for that many, with so many slots. No block goes without a vector: each must hear from every
    peer."""
    warps = -(-count // WARP)
    blocks = min(blocks, warps)
    return blocks, min(threads, slots, -(-warps // blocks) * WARP)


def up(n: int, to: int) -> int:
    """``n``, or the next multiple of ``to`` above it."""
    return -(-n // to) * to


def workers(world_size: int) -> int:
    """Threads of a block that send, at most, where the others mind the slots between the epochs of a launch."""
    return THREADS if world_size <= 4 else THREADS // 2


def at_once(world_size: int) -> int:
    """Vectors of each peer that such a thread takes at once (bench/results/h100-x2-chunks.txt)."""
    return max(1, 4 // world_size)
