"""How rows are assigned to blocks, and the workspace. Pure functions, no GPU."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..device.comm.exchange_time import all_reduce_time_us
from ..device.comm.ll_exchange import BLOCKS, VECTOR, WARP, ExchangeLayout, check_grid, up

FORMS = ("one_shot", "two_shot")
CLUSTERS = (1, 2, 4, 8)  #: blocks that work on a row together
THREADS = 512  #: the largest block
MAX_WORLD_SIZE = 8
MAX_BYTES = 16 << 20  #: of x in one launch; more rows go chunk by chunk

# From how many KiB of x on two_shot is faster: measured on 2 H200, else what all_reduce has.
_TWO_SHOT_FROM = {2: 5120, 3: 384, 4: 192, 5: 144, 6: 104, 7: 80, 8: 64}


@dataclass(frozen=True)
class AllReduceRmsNormConfig:
    """``form``: the kernel. ``cluster``: blocks that work on a row together, or on a group of world_size rows.
    ``blocks``: of a launch, at most, or one cluster. ``threads``: of a block, at most. ``in_turn``: each rank sends to
    one peer after the other."""

    form: str
    cluster: int
    blocks: int = BLOCKS
    threads: int = THREADS
    in_turn: bool = False

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"form: is {self.form!r}, must be one of {FORMS}")
        if self.cluster not in CLUSTERS:
            raise ValueError(f"cluster: is {self.cluster}, must be one of {CLUSTERS}")
        check_grid(self.blocks, self.threads)


@dataclass(frozen=True)
class Shape:
    """What a launch looks like: ``per_thread`` vectors of a row; ``slots`` of each sender; ``rows`` at most."""

    blocks: int
    threads: int
    per_thread: int
    slots: int
    rows: int


# Vectors of a row that a block of a cluster sends in one_shot, at least: between 2 H200 more blocks with less to send
# are no faster (bench/results/h200-x2-norm-clusters.txt).
_LEAST_SENT = 128
# Blocks of a cluster by choice. Eight are no faster there either, and a cluster must find its SMs in one part of the
# GPU, while other kernels run.
_MOST_SPREAD = 4

# Microseconds of the sums over a row; x, the residual and both results, which are read or written while nothing is
# sent, and bytes of them a microsecond: as long as all stay in the L2 cache (fitted to the all_reduce_rms_norm files of
# bench/results) and else (to h100-x2-norm-kinds.txt, from 16 MiB of x on).
_NORM, _TENSORS = 0.7, 4
_CACHED, _MEMORY, _MOST_CACHED = 12e6, 3e6, 50 << 20


def most_per_thread(world_size: int) -> int:
    """Vectors of a row that a thread can hold in registers, from every rank at once."""
    return 2 if world_size <= 4 else 1


def most_vectors(world_size: int, most_cluster: int = CLUSTERS[-1]) -> int:
    """Vectors that a row may have, on a GPU with clusters of so many blocks."""
    return most_cluster * THREADS * most_per_thread(world_size)


def _units(rows: int, world_size: int, form: str) -> int:
    """What teams take in turn: rows, or groups of them."""
    return rows if form == "one_shot" else -(-rows // world_size)


@lru_cache(maxsize=4096)
def choose_all_reduce_rms_norm(
    rows: int, vectors: int, world_size: int, num_sms: int = BLOCKS, most_cluster: int = CLUSTERS[-1]
) -> AllReduceRmsNormConfig:
    """The configuration for ``rows`` of ``vectors`` vectors each; the same on every rank.

    As many SMs as a cluster can span and each has enough to send; clusters of one where there are
    rows enough. ``num_sms``: blocks at most, or those of one cluster. ``most_cluster``: 1 on GPUs without clusters.
    """
    most = min(BLOCKS, num_sms)
    nbytes = rows * vectors * VECTOR
    two_shot = world_size in _TWO_SHOT_FROM and nbytes >= _TWO_SHOT_FROM[world_size] << 10
    form = "two_shot" if two_shot else "one_shot"
    chunks = -(-vectors // WARP)
    fitting = [c for c in CLUSTERS if c <= min(chunks, most_cluster)]
    held = [c for c in fitting if c * THREADS * most_per_thread(world_size) >= vectors]
    sent = vectors * (world_size - 1)  # of a row, in one_shot
    spread = [c for c in held if c <= _MOST_SPREAD and c * _units(rows, world_size, form) <= most]
    if form == "one_shot":
        spread = [c for c in spread if c == 1 or c * _LEAST_SENT <= sent]
    return AllReduceRmsNormConfig(form, spread[-1] if spread else held[0], most)


def shape(rows: int, vectors: int, world_size: int, config: AllReduceRmsNormConfig) -> Shape:
    """The launches for ``rows`` of ``vectors`` vectors."""
    chunks = -(-vectors // WARP)
    mine = -(-chunks // config.cluster)  # of a block
    per_thread = -(-mine * WARP // config.threads)
    threads = -(-mine // per_thread) * WARP
    step = world_size if config.form == "two_shot" else 1
    most = max(step, MAX_BYTES // (vectors * VECTOR) // step * step)
    units = _units(min(rows, most), world_size, config.form)
    teams = min(units, max(1, config.blocks // config.cluster))
    slots = -(-units // teams) * per_thread * threads * (2 if config.form == "two_shot" else 1)
    return Shape(teams * config.cluster, threads, per_thread, up(slots, 2 * WARP), most)


def all_reduce_rms_norm_layout(
    rows: int, vectors: int, world_size: int, config: AllReduceRmsNormConfig
) -> ExchangeLayout:
    """The workspace for that."""
    wanted = shape(rows, vectors, world_size, config)
    return ExchangeLayout(world_size, wanted.slots, wanted.blocks)


def estimate_all_reduce_rms_norm_us(
    rows: int, vectors: int, world_size: int, config: AllReduceRmsNormConfig | None = None
) -> float:
    """Microseconds of a norm with a residual, of either kind; by the chosen configuration if none is given.

    A LayerNorm takes up to 8 % more, of few rows (bench/results/h100-x2-norm-kinds.txt).
    """
    config = config or choose_all_reduce_rms_norm(rows, vectors, world_size)
    nbytes = rows * vectors * VECTOR
    launches = -(-rows // shape(rows, vectors, world_size, config).rows)
    rate = _CACHED if _TENSORS * nbytes <= _MOST_CACHED else _MEMORY
    each = all_reduce_time_us(nbytes / launches, world_size, config.form) + _NORM
    return launches * each + _TENSORS * nbytes / rate
