"""The configuration of all_gather_matmul: which kernel, its tile and tile order, and the chunks in which shards
arrive."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from operator import itemgetter
from typing import TypeAlias

import torch

from ...symm_mem.layout import Layout
from ..device.comm.copy_engine import CopiedConfig
from ..device.comm.ll_exchange import VECTOR, ExchangeLayout
from ..device.device_spec import device_spec_of
from ..device.gemm import gemm_tiles, one_shot
from ..device.gemm.one_shot import OneShotConfig
from ..device.gemm.scaling import ScaledProducts, ScaleKind
from .estimate import (
    CHUNK_COLUMNS,
    FIT_ROWS,
    RASTER_GROUP,
    AllGatherMatmulProblem,
    GatherPushConfig,
    clusters_of,
    estimate_copied_us,
    estimate_gather_push_us,
    skipped_steps_of,
    slot_bytes,
)

EXCHANGED_OP = "fused_all_to_all_matmul"  #: of rows that each rank has for each
MOST_BS = 4  # of one launch
# Rows of a chunk and columns of a k-chunk (which has at most 32 chunks of a row of tiles): with communication SMs and
# without, each for one wave of tiles and for more. Measured with one rank of 2 and of 4 alone. Between more than four a
# chunk goes to more peers and takes longer, so the next smaller ones of _SMALLER: estimated, not measured.
_CHUNKS_OF_TWO = {True: ((32, 256), (64, 512)), False: ((32, 512), (64, 1024))}
_CHUNKS = {True: ((16, 256), (32, 512)), False: ((32, 512), (64, 1024))}
_SMALLER = {(64, 1024): (32, 512), (32, 512): (16, 256), (16, 256): (16, 256)}
# Microseconds of a copy kernel, and the share of memory bandwidth that it reaches: unfused, shards of the last
# dimension are put side by side between the all-gather and the matmul. Not fitted: a launch, a read and a write.
_COPY, _COPIED = 3.0, 0.36
_ORDER = 2.5  # microseconds of a kernel that puts the ranks' scales of blocks side by side, on H100
# Of fp8 operands, which was measured as a multiple of what is predicted: by kernel.cu, and in one shot around torch's
# product, which of row-wise scales is a faster one (bench/results/h200-x2-scaled-choices.txt). Of row-wise scales
# kernel.cu takes the more the longer products are (bench/results/h100-x2-scaled-copies.txt).
_SCALED_PUSH = {ScaleKind.TENSOR: 1.06, ScaleKind.ROWS: 1.07, ScaleKind.BLOCKS: 1.0}
_LONG_ROWS_PUSH, _SHORT_US, _LONG_US = 1.12, 250.0, 700.0
_SCALED_ONE_SHOT = {ScaleKind.TENSOR: 0.96, ScaleKind.ROWS: 0.97, ScaleKind.BLOCKS: 1.0}
# Rows of all ranks of which one shot is faster, whatever the model says: a tile is not full of them
# (bench/results/h200-x2-sm80.txt).
_FEW_ROWS = 128
# Of estimate_one_shot_gather_us: matmuls that take so many times as long as the sending, and the share that counts.
_HIDES, _MOST_NOT_HIDDEN = 12, 0.04


@dataclass(frozen=True, eq=False)
class GatherScales:
    """Of the operands of a call, as kernel.cu takes them; float32, contiguous.

    Attributes:
        a: one; of the own rows [S, m]; or, if they do not travel, of all ranks' rows [W, m].
        bs: of each B one; [N]; or [K / 128, N / 128] with any strides. Those of columns begin at multiples of 16 bytes.
        biases: of each B [N], at such an address, or None.
    """

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    biases: Sequence[torch.Tensor | None]

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [self.a, *self.bs, *(bias for bias in self.biases if bias is not None)]


@dataclass(frozen=True, eq=False)
class GatherKernelCall:
    """What a kernel is called with.

    Attributes:
        a: the own shard, [m, K], contiguous, or as ``takes_rows`` allows; with ``exchanged`` [W * m, K].
        bs: each [K, N_i]; with ``split_k`` [W * K, N_i]. All tensors begin at multiples of 16 bytes.
        num_sms: SMs that it may use.
        split_k: shards lie side by side: ``A = cat(shards, 1)``, and the products add up over them.
        return_A: what is gathered is wanted, too.
        preferred: the algorithm to take where it can be, "push", "one_shot" or "copy_engine"; None for the fastest.
        scaled: the operands are fp8, two of them each number here.
        scales: theirs; given when the call is launched.
        exchanged: each rank gets rows of its own of every rank's A; with ``split_k``.
    """

    a: torch.Tensor
    bs: Sequence[torch.Tensor]
    num_sms: int
    split_k: bool = False
    return_A: bool = False
    preferred: str | None = None
    scaled: ScaledProducts | None = None
    scales: GatherScales | None = None
    exchanged: bool = False

    def rows(self, world_size: int) -> int:
        """That a rank sends to another one."""
        return self.a.shape[0] // world_size if self.exchanged else self.a.shape[0]

    def problem(self, world_size: int) -> AllGatherMatmulProblem:
        m, k, ns = self.rows(world_size), self.a.shape[1], tuple(b.shape[1] for b in self.bs)
        return AllGatherMatmulProblem(
            *(m, ns, k, world_size, self.num_sms, self.split_k, self.return_A),
            spec=device_spec_of(self.a.device, scaled=self.scaled is not None),
            scaled=self.scaled,
            itemsize=self.a.dtype.itemsize,
            copies=self.preferred == "copy_engine",
            exchanged=self.exchanged,
        )


AnyConfig: TypeAlias = GatherPushConfig | OneShotConfig | CopiedConfig


def choose_one_shot_gather(problem: AllGatherMatmulProblem) -> OneShotConfig | None:
    """The configuration of a gather in one shot; None if that takes no such call."""
    # What is gathered in one shot is for the products alone: a pair of NaNs with all bits set arrives as another pair
    # (ll_exchange.cuh), which makes no difference to them, but A must be bit for bit what the shards are.
    shard = problem.m * problem.k * 2
    if problem.return_A or problem.itemsize > 2 or (problem.split_k and problem.scaled is not None):
        return None
    if problem.exchanged:  # here each peer gets the same rows
        return None
    if problem.world_size * shard > one_shot.MOST_BYTES:
        return None
    if (scaled := problem.scaled) is not None:
        scales = scaled.sent_bytes(problem.m, problem.k)
        if not scaled.torch_has_it or scales % VECTOR:
            return None
        shard += scales
    return one_shot.config(shard, problem.num_sms)


def estimate_one_shot_gather_us(problem: AllGatherMatmulProblem) -> float:
    """Microseconds: nothing hides anything. Against products that take much longer than the sending, which a
    kernel that does both hides best, it was measured to lose 2 to 4 % of them more than the sum says (8b.upgate up to
    M = 2048, bench/results/h200-x2-choices.txt); longer ones are taken to lose no larger share."""
    sent, size = problem.moved, problem.world_size
    depth = size * problem.k if problem.split_k else problem.k
    products = gemm_tiles.matmuls_us(problem.rows, problem.ns, depth, problem.spec)
    if problem.scaled is not None:
        products *= problem.scaled.torch_slowdown
        sent += problem.scaled.sent_bytes(problem.m, problem.k) * (size - 1)
    not_hidden = max(0.0, products - _HIDES * one_shot.sending_us(sent, size))
    ordered = _ORDER if problem.scaled is not None and problem.scaled.kind is ScaleKind.BLOCKS else 0.0
    exchanged = one_shot.exchange_us(sent, size) + ordered
    factor = 1.0 if problem.scaled is None else _SCALED_ONE_SHOT[problem.scaled.kind]
    return factor * (exchanged + products + min(not_hidden, _MOST_NOT_HIDDEN * products))


def choose_copied_gather(problem: AllGatherMatmulProblem) -> CopiedConfig | None:
    """The configuration; None where no such call is taken. kernel.cu is faster where it runs. Scales of blocks would
    have to be put in torch's order."""
    scaled = problem.scaled
    if problem.exchanged:  # here each peer gets the same rows
        return None
    if scaled is None:
        return None if problem.has_gemm and not problem.copies else CopiedConfig()
    if scaled.kind is ScaleKind.BLOCKS or not scaled.torch_has_it:
        return None
    return None if problem.split_k or problem.return_A else CopiedConfig()


def rank_gather_kernels(problem: AllGatherMatmulProblem) -> list[tuple[float, AnyConfig]]:
    """All candidates with their predicted microseconds, the fastest first; none where no kernel takes such a call.

    A pure function: all ranks choose alike.
    """
    ranked: list[tuple[float, AnyConfig]] = [*rank_gather_pushes(problem)]
    gather = choose_one_shot_gather(problem)
    if gather is not None:
        ranked.append((estimate_one_shot_gather_us(problem), gather))
    if (copied := choose_copied_gather(problem)) is not None:
        ranked.append((estimate_copied_us(problem), copied))
    few = gather is not None and problem.scaled is None and problem.rows <= _FEW_ROWS
    return sorted(ranked, key=lambda each: (few and isinstance(each[1], GatherPushConfig), each[0]))


def gather_layout(problem: AllGatherMatmulProblem, config: AnyConfig) -> Layout | ExchangeLayout:
    """The workspace."""
    if isinstance(config, OneShotConfig):
        return config.layout(problem.world_size)
    if isinstance(config, CopiedConfig):
        return copied_layout(problem)
    return gather_push_layout(problem.m, problem.k, problem.world_size, config)


def copied_layout(problem: AllGatherMatmulProblem) -> Layout:
    """The workspace: a slot for each rank, and a flag."""
    return Layout(problem.world_size, 1, problem.world_size * slot_bytes(problem))


def gather_is_profitable(problem: AllGatherMatmulProblem) -> bool:
    """Whether the fastest candidate is predicted to beat an all-gather before the matmuls. Of float32, whose products
    have no model, what is large enough."""
    if problem.itemsize == 2:
        return gather_saves_us(problem) > 0
    elements = problem.world_size * problem.m * problem.k
    gathered, multiplying = elements * problem.itemsize, elements * sum(problem.ns) / gemm_tiles.MULTIPLY_ADDS
    overlapped = not problem.split_k and gathered >= 4 << 20 and multiplying >= 80
    return gathered >= 32 << 20 or overlapped


def gather_saves_us(problem: AllGatherMatmulProblem) -> float:
    """Microseconds by which it is predicted to beat that; 0 of what no kernel takes."""
    m, n, k, size = problem.m, sum(problem.ns), problem.k, problem.world_size
    if 0 in (m, n, k):
        return 0.0
    if not (ranked := rank_gather_kernels(problem)):
        return 0.0
    fused, _ = ranked[0]
    if problem.exchanged:
        unfused = one_shot.exchange_us(problem.moved, size)
        unfused += gemm_tiles.matmul_us(m, n, size * k, problem.spec)
    elif not problem.split_k:
        unfused = gemm_tiles.unfused_us(size * m, n, k, problem.moved, problem.spec, problem.scaled)
    else:
        unfused = gemm_tiles.unfused_us(m, n, size * k, problem.moved, problem.spec)
        unfused += _COPY + size * m * k * 2 / (_COPIED * problem.spec.memory)
    return unfused - fused


@lru_cache(maxsize=4096)
def rank_gather_pushes(problem: AllGatherMatmulProblem) -> tuple[tuple[float, GatherPushConfig], ...]:
    """All candidates with the microseconds that ``estimate_gather_push_us`` predicts, the fastest first."""
    if not problem.has_gemm:
        return ()
    # To a millionth: ties stay ties whatever the order of the sums, and the first candidate is taken.
    factor = _push_factor(problem)
    found = [(round(factor * estimate_gather_push_us(c, problem), 6), c) for c in push_candidates(problem)]
    return tuple(sorted(found, key=itemgetter(0)))


def _push_factor(problem: AllGatherMatmulProblem) -> float:
    """How much longer kernel.cu takes than is predicted of 16-bit numbers."""
    if problem.scaled is None:
        return 1.0
    factor = _SCALED_PUSH[problem.scaled.kind]
    if problem.scaled.kind is ScaleKind.ROWS:
        products = gemm_tiles.matmuls_us(problem.world_size * problem.m, problem.ns, problem.k, problem.spec)
        part = (products - _SHORT_US) / (_LONG_US - _SHORT_US)
        factor += (_LONG_ROWS_PUSH - factor) * min(1.0, max(0.0, part))
    return factor


def push_candidates(problem: AllGatherMatmulProblem) -> list[GatherPushConfig]:
    """Candidates for the fastest; of equal predictions the first counts. A group is one or two rows of
    tiles of all peers, or as many as keep every block busy once, all of them if there are no more: where the data is
    waited for, the tiles of the last group then advance together as it comes."""
    m, ns, k, world_size = problem.m, problem.ns, problem.k, problem.world_size
    num_sms, split_k = problem.num_sms, problem.split_k
    configs: list[GatherPushConfig] = []
    # Rows of tiles, one of each peer, that arrive together.
    listed = 1 if split_k else world_size - 1
    several = [s for s in _comm_sms(problem.moved, world_size, split_k) if 4 * s <= num_sms]
    suited = gemm_tiles.suited(world_size * m, sum(ns), k, world_size, stores_only=True, spec=problem.spec)
    for tile in gemm_tiles.suited_to(suited, problem.scaled):
        rows, columns = problem.tiles(tile)
        one_wave = gemm_tiles.waves(tile, rows * world_size, ns, num_sms) == 1
        for comm_sms in several:
            skipped_steps = skipped_steps_of(tile, comm_sms, problem) if comm_sms else 0
            fill = (num_sms - comm_sms) // (listed * columns)
            for group in sorted({1, 2, min(fill, rows)} & set(range(1, rows + 1)), reverse=comm_sms > 0):
                chunk_rows, k_chunk_columns = _chunks(comm_sms, one_wave, world_size, split_k)
                for raster_group in _raster_groups(problem):
                    config = GatherPushConfig(
                        *(tile, comm_sms, group),
                        chunk_rows=chunk_rows,
                        k_chunk_columns=k_chunk_columns,
                        raster_group=raster_group,
                        remote_raster_group=max(raster_group, -(-group * listed // 2)),
                        split_k=split_k,
                        skipped_steps=skipped_steps,
                        scaled=problem.scaled,
                        exchanged=problem.exchanged,
                    )
                    shortened = _with_first_wave(config, problem)
                    configs += [config] if shortened is None else [shortened, config]
    return configs


def _raster_groups(problem: AllGatherMatmulProblem) -> tuple[int, ...]:
    """Wide ones come first: where their rows are not waited for they were up to 3.3 % faster, once 0.8 % slower
    (bench/results/h100-x2-sustained.txt). Measured between two, of whole rows of 16 bits."""
    if problem.world_size > 2 or problem.split_k or problem.scaled is not None:
        return (RASTER_GROUP,)
    return 2 * RASTER_GROUP, RASTER_GROUP


def _chunks(comm_sms: int, one_wave: bool, world_size: int, split_k: bool) -> tuple[int, int]:
    """``chunk_rows`` and ``k_chunk_columns``. A warp sends a chunk to all peers at its share of the links' rate.
    Its flags come after it: 64 rows take 3 us between two ranks, 7 to 13 between four. All tiles of a single wave wait
    for the first chunks; after other tiles more flags may cost more than that."""
    if split_k:
        return FIT_ROWS, 1024
    found = (_CHUNKS_OF_TWO if world_size == 2 else _CHUNKS)[comm_sms > 0][0 if one_wave else 1]
    return _SMALLER[found] if world_size > 4 else found


def _comm_sms(moved: int, world_size: int, split_k: bool) -> tuple[int, ...]:
    """How many blocks may only send at first, where ``moved`` bytes are sent. What was measured to be a little faster
    than others of equal prediction comes first."""
    if world_size > 2:
        return (8, 12, 16, 0) if moved < 20 << 20 else (12, 16, 8, 0)
    if split_k:
        return (0,)  # no rows are all local, with which others could begin
    return (12, 8, 16, 0) if moved < 10 << 20 else (8, 16, 12, 0)


def _with_first_wave(config: GatherPushConfig, problem: AllGatherMatmulProblem) -> GatherPushConfig | None:
    """The same, with the steps that full waves leave over as its first wave; None if there are none, or too many."""
    rows, columns = problem.tiles(config.tile)
    own, steps = rows // 2 * columns, (rows * problem.world_size + 1) // 2 * columns
    others, clusters = clusters_of(config, problem.num_sms)
    rest = steps - config.skipped_steps * others
    first_wave = rest % clusters if rest > 0 else steps % others
    if config.split_k or len(problem.ns) > MOST_BS or not 0 < first_wave <= min(own, others):
        return None
    return replace(config, first_wave=first_wave)


def gather_push_layout(m: int, k: int, world_size: int, config: GatherPushConfig) -> Layout:
    """The workspace of shards [m, K] of 16 bits: a buffer holds ``[W, m, K]``, and after that the scales that
    travel. In an epoch a rank sets a flag at a peer for each chunk."""
    k_chunks = -(-m // config.tile.block_m) * -(-k // config.k_chunk_columns)
    flags = k_chunks * (config.tile.block_m // config.chunk_rows) * (config.k_chunk_columns // CHUNK_COLUMNS)
    scales = 0 if config.scaled is None else config.scaled.sent_bytes(m, k)
    return Layout(world_size, flags, world_size * (m * k * 2 + scales))
