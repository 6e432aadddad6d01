"""Whether fusing is profitable for a problem, and what it should save: asked by the graph pass, before there are
tensors.

Pure functions of what is the same on every rank. They say no where the op itself would run unfused, and where it would
be slower than what it replaces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...kernels.all_gather_matmul import configs as gather
from ...kernels.all_reduce.configs import estimate_all_reduce_us
from ...kernels.all_reduce_rms_norm import configs as norms
from ...kernels.device.capability import why_no_kernel_on
from ...kernels.device.collective import combine
from ...kernels.device.comm.exchange_time import estimate_all_gather_us, estimate_reduce_scatter_us
from ...kernels.device.device_spec import DeviceSpec, device_spec_of
from ...kernels.device.gemm.gemm_tiles import LINK, MULTIPLY_ADDS, matmul_us, nccl_us, product_us
from ...kernels.device.gemm.scaling import ScaledProducts, has_block_product
from ...kernels.device.gemm.supported import why_last_dim_not_gathered, why_last_dim_not_scattered
from ...kernels.matmul_all_gather.configs import (
    MatmulAllGatherProblem,
    copied_pieces_save_us,
    estimate_copied_pieces_us,
)
from ...kernels.matmul_all_reduce import configs as few_rows
from ...kernels.matmul_reduce_scatter import configs as scatter
from ...symm_mem.backends.cuda_state import HOPPER_SMS

OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "all_gather_scaled_matmul",
    "scaled_matmul_reduce_scatter",
    "matmul_all_reduce",
    "matmul_all_gather",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
)
_ALONE = ("all_gather", "reduce_scatter", "all_to_all")
_GATHERING = ("all_gather_matmul", "all_gather_scaled_matmul")
_ROW = 16  # bytes; the kernels' descriptors need rows of a multiple
# Of HOPPER_SMS that some are reserved on a machine does not change what is profitable.
# Bytes of the whole tensor up to which a collective is taken: all that was measured was faster than NCCL
# (bench/results/h100-x*.json), all-reduces up to 256 MiB on 3 and 4 ranks, by 1 % at the largest, the others up to
# 128 MiB on 2 and 4. On more ranks nothing was: all-reduces up to what H200s gave on 4, of the others what latency
# decides, and of all-to-alls on more than 2 ranks.
_MOST_REDUCED, _MOST_REDUCED_BY_MORE = 128 << 20, 64 << 20
_MOST_ALONE, _MOST_ALONE_OF_MORE = 128 << 20, 1 << 20
_MEASURED_RANKS, _MOST_EXCHANGED = 4, 256 << 20  # of all-to-alls between 2 (h200-x2-all_to_all-large.json)
_MOST_COMBINED = 2 << 20  # of the tail of a layer of experts, likewise (bench/results/h200-x2-experts.json)
_LEAST_ASYNC = 512 << 10  # bytes of a part that copy engines send: below, launches take longer than the way
# bytes and multiply-adds per microsecond; between CPU ranks of the order of one core each.
_RATES = {"cuda": (LINK, MULTIPLY_ADDS), "cpu": (5e3, 30e3)}


@dataclass(frozen=True)
class FusionCandidate:
    """What could be fused into a call of an op.

    Attributes:
        op: one of ``OPS``.
        m, n, k: the product that a rank computes, [m, k] @ [k, n]: of all_gather_matmul the gathered A and the
            columns of all Bs, of the others the own product. Collectives alone are of [m, n], the whole
            tensor; their k is 0.
        last_dim: whether the last dimension is gathered or scattered.
        return_A: whether what is gathered is wanted, too.
        scaled: of the scaled ops how operands are scaled; ``dtype`` is that of what is sent.
    """

    op: str
    m: int
    n: int
    k: int
    world_size: int
    dtype: torch.dtype
    device_type: str
    last_dim: bool = False
    return_A: bool = False
    scaled: ScaledProducts | None = None


def why_not_profitable(candidate: FusionCandidate) -> str | None:
    """Why it should not be fused; None if it should.

    Raises:
        ValueError: there is no such op.
    """
    op, m, n, k = candidate.op, candidate.m, candidate.n, candidate.k
    world_size, dtype, last_dim = candidate.world_size, candidate.dtype, candidate.last_dim
    if op not in OPS:
        raise ValueError(f"op: is {op!r}, must be one of {', '.join(OPS)}")
    if candidate.device_type != "cuda":
        return None
    if (reason := why_no_kernel_on(op, _current_gpu())) is not None:
        return reason
    buffers = dtype.itemsize == 2
    if op in _ALONE:
        size = m * n * dtype.itemsize
        exchanged = op == "all_to_all"
        most = _MOST_EXCHANGED if exchanged else _MOST_ALONE
        if world_size > (2 if exchanged else _MEASURED_RANKS):
            most = _MOST_ALONE_OF_MORE
        return None if size <= most else _too_large(f"sent between {world_size} ranks", size, most)
    if op in ("all_reduce", "matmul_all_reduce"):
        size = m * n * dtype.itemsize
        most = _MOST_REDUCED if world_size <= _MEASURED_RANKS else _MOST_REDUCED_BY_MORE
        if size <= most or world_size == 2:
            return None
        if op == "matmul_all_reduce" and buffers:
            of_sum = scatter.MatmulReduceScatterProblem(
                m, n, k, world_size, HOPPER_SMS, to_all=True, spec=_spec()
            )
            if scatter.sum_to_all_is_profitable(of_sum):
                return None
        return _too_large("reduced", size, most)
    if op == "matmul_all_gather":
        saves = copied_pieces_save_us(_pieces_of(candidate)) > 0
        return None if saves else f"too little is multiplied and gathered ({m} x {k} @ {k} x {n})"
    if candidate.scaled is not None and 0 in (m, n, k):
        return f"of [{m}, {k}] and [{k}, {n}] one is empty"
    if last_dim and (reason := _why_not_last_dim(candidate)) is not None:
        return reason
    if candidate.scaled is not None:
        return None if _saved(candidate) > 0 else _too_little(candidate)
    gathers = op == "all_gather_matmul"
    # Of a rank's shard, or of its result.
    rows = m if last_dim else m // world_size
    depth = k // world_size if last_dim and gathers else k
    columns = n // world_size if last_dim and not gathers else n
    if 0 in (rows, depth, columns):
        return f"of a rank's [{rows}, {depth}] and [{depth}, {columns}] one is empty"
    for row in (depth, columns):
        if row * dtype.itemsize % _ROW:
            return f"rows of {row} x {dtype} are no multiple of {_ROW} bytes"
    problem = _problem(candidate, _spec())
    if isinstance(problem, gather.AllGatherMatmulProblem):
        return None if gather.gather_is_profitable(problem) else _too_little(candidate)
    return None if scatter.scatter_is_profitable(problem) else _too_little(candidate)


def why_combined_before(candidate: FusionCandidate, *, norm: bool = False) -> str | None:
    """Why what experts' outputs add up to should be there before it is reduced; None if its op should put it together.

    Args:
        candidate: of the collective alone.
        norm: whether the op norms the sum, too.
    """
    c = candidate
    if c.device_type != "cuda":
        return None
    if (reason := combine.why_not_combined(c.m, c.n, c.dtype)) is not None:
        return reason
    if (size := c.m * c.n * c.dtype.itemsize) > _MOST_COMBINED:
        return f"{size >> 10} KiB are put together: beyond {_MOST_COMBINED >> 10} KiB that was not measured"
    if norm and predicted_us(replace(c, op="all_reduce_rms_norm")) is None:
        return f"the norm's kernel takes no rows of {c.n} x {c.dtype} between {c.world_size} ranks"
    return None


def why_not_async(part_bytes: int, device_type: str) -> str | None:
    """Why a collective should not be copy engines' that runs beside others; None if it should.

    Args:
        part_bytes: what each rank sends to each.
    """
    if device_type == "cuda" and (why := why_no_kernel_on("async_collectives", _current_gpu())) is not None:
        return why
    if part_bytes % _ROW:
        return f"parts of {part_bytes} bytes are no multiple of {_ROW}"
    if part_bytes < _LEAST_ASYNC:
        return f"parts of {part_bytes} bytes are less than {_LEAST_ASYNC}"
    return None


def _why_not_last_dim(candidate: FusionCandidate) -> str | None:
    c = candidate
    if c.op in _GATHERING:
        return why_last_dim_not_gathered(c.scaled)
    return why_last_dim_not_scattered(c.scaled, c.n // c.world_size)


def _too_little(candidate: FusionCandidate) -> str:
    m, n, k = candidate.m, candidate.n, candidate.k
    verb = "gathered and multiplied" if candidate.op in _GATHERING else "multiplied and scattered"
    return f"too little is {verb} ({m} x {k} @ {k} x {n})"


def _saved(candidate: FusionCandidate) -> float:
    """Microseconds by the model of the kernels for 16 bits and fp8, with which their calls are planned."""
    problem = _problem(candidate, _spec(scaled=candidate.scaled is not None))
    if isinstance(problem, gather.AllGatherMatmulProblem):
        return gather.gather_saves_us(problem)
    return scatter.scatter_saves_us(problem)


def _problem(
    candidate: FusionCandidate, spec: DeviceSpec
) -> gather.AllGatherMatmulProblem | scatter.MatmulReduceScatterProblem:
    """What those kernels are asked for."""
    c, scaled, size = candidate, candidate.scaled, candidate.world_size
    rows, depth = (c.m, c.k // size) if c.last_dim and c.op in _GATHERING else (c.m // size, c.k)
    itemsize = c.dtype.itemsize if scaled is None else 2
    if scaled is not None:
        depth //= 2  # in pairs of numbers
        scaled = replace(scaled, torch_has_blocks=has_block_product(c.m, scaled.types, _current_gpu()))
    if c.op in _GATHERING:
        return gather.AllGatherMatmulProblem(
            *(rows, (c.n,), depth, size, HOPPER_SMS, c.last_dim, c.return_A, spec, scaled, itemsize)
        )
    rows, columns = (c.m, c.n // size) if c.last_dim else (rows, c.n)
    return scatter.MatmulReduceScatterProblem(
        *(rows, columns, depth, size, HOPPER_SMS),
        split_n=c.last_dim,
        spec=spec,
        scaled=scaled,
        itemsize=itemsize,
    )


def _pieces_of(c: FusionCandidate) -> MatmulAllGatherProblem:
    return MatmulAllGatherProblem(c.m, c.n, c.k, c.world_size, c.dtype.itemsize, _spec())


def _too_large(verb: str, size: int, most: int) -> str:
    return f"{size >> 20} MiB are {verb}: beyond {most >> 20} MiB that is left to the backend"


def expected_gain(candidate: FusionCandidate) -> float:
    """Microseconds that fusing should save. A collective alone saves none: 0.

    Of matmuls of 16 bits and fp8 on CUDA: by how much the plan's prediction is less than that of what is replaced. Of
    others what is hidden.
    """
    c = candidate
    if c.op == "matmul_all_gather" and c.device_type == "cuda":
        return max(0.0, copied_pieces_save_us(_pieces_of(c)))
    modelled = c.dtype.itemsize == 2 or c.scaled is not None
    if c.device_type != "cuda" or not modelled or c.op in (*_ALONE, "all_reduce"):
        return hidden_us(c)
    if c.op != "matmul_all_reduce":
        return max(0.0, _saved(c))
    fused = predicted_us(c)
    if fused is None:
        return 0.0
    moved = 2 * (c.world_size - 1) * c.m * c.n * 2 // c.world_size
    unfused = product_us(c.m, c.n, c.k, c.world_size, _spec()) + nccl_us(moved)
    return max(0.0, unfused - fused)


def gain_of_joining(candidate: FusionCandidate, depths: Sequence[int]) -> float:
    """Microseconds that a matmul_all_reduce saves over several products, of so many columns of A each, with an
    all-reduce of weft's after their sum."""
    c = candidate
    fused, reduced = predicted_us(c), predicted_us(replace(c, op="all_reduce", k=0))
    if fused is None or reduced is None:
        return hidden_us(c)
    return sum(product_us(c.m, c.n, k, c.world_size, _spec()) for k in depths) + reduced - fused


def predicted_us(candidate: FusionCandidate, spec: DeviceSpec | None = None) -> float | None:
    """Microseconds of a call of the op by its kernels' model, as its plan has them; None of CPU ranks, of products of
    float32, and of what no kernel takes.

    Args:
        candidate: also of all_reduce_rms_norm, of [m, n].
        spec: of which device, if not of the current one: for who must predict alike on ranks whose GPUs differ.
    """
    c, size = candidate, candidate.world_size
    if c.device_type != "cuda":
        return None
    nbytes = c.m * c.n * c.dtype.itemsize
    if c.op == "matmul_all_gather":
        found = _pieces_of(c)
        return estimate_copied_pieces_us(found) if found.pieces() else None
    if c.op == "all_reduce":
        return estimate_all_reduce_us(nbytes, size)
    if c.op in _ALONE:
        estimate = estimate_reduce_scatter_us if c.op == "reduce_scatter" else estimate_all_gather_us
        return estimate(nbytes // size, size)
    if c.op == "all_reduce_rms_norm":
        vectors, odd = divmod(c.n * c.dtype.itemsize, norms.VECTOR)
        if odd or not nbytes or size > norms.MAX_WORLD_SIZE or vectors > norms.most_vectors(size):
            return None
        return norms.estimate_all_reduce_rms_norm_us(c.m, vectors, size)
    if (c.dtype.itemsize != 2 and c.scaled is None) or 0 in (c.m, c.n, c.k):
        return None
    spec = spec or _spec(scaled=c.scaled is not None)
    if c.op == "matmul_all_reduce":
        return _matmul_all_reduce_us(c, spec)
    if 0 in (c.m // size, c.n // size, c.k // size):
        return None
    problem = _problem(c, spec)
    ranked: Sequence[tuple[float, object]]
    if isinstance(problem, gather.AllGatherMatmulProblem):
        ranked = gather.rank_gather_kernels(problem)
    else:
        ranked = scatter.rank_scatter_kernels(problem)
    return ranked[0][0] if ranked else None


def _matmul_all_reduce_us(candidate: FusionCandidate, spec: DeviceSpec) -> float:
    """By the one of its three ways that the op takes."""
    m, n, k, size = candidate.m, candidate.n, candidate.k, candidate.world_size
    config = few_rows.choose_matmul_all_reduce(m, n, HOPPER_SMS)
    if config is not None and few_rows.few_rows_kernel_is_profitable(config, n, k):
        return few_rows.estimate_few_rows_us(m, n, k, size, spec)
    of_sum = scatter.MatmulReduceScatterProblem(m, n, k, size, HOPPER_SMS, to_all=True, spec=spec)
    if scatter.sum_to_all_is_profitable(of_sum):
        return scatter.rank_scatter_pushes(of_sum)[0][0]
    return matmul_us(m, n, k, spec) + estimate_all_reduce_us(m * n * 2, size)


def hidden_us(candidate: FusionCandidate) -> float:
    """Microseconds of the shorter of sending and multiplying, which is hidden by the other.

    Sending takes bytes / link, multiplying m * n * k / rate; the link and the rate are constants of the device type.
    Launches and how well either runs are left out.
    """
    m, n, k, world_size = candidate.m, candidate.n, candidate.k, candidate.world_size
    link, rate = _RATES.get(candidate.device_type, _RATES["cpu"])
    columns = {
        "all_gather_matmul": k,
        "all_gather_scaled_matmul": k,
        "matmul_reduce_scatter": n,
        "scaled_matmul_reduce_scatter": n,
        "matmul_all_gather": n * world_size,
    }
    sent = m * columns.get(candidate.op, 2 * n) * candidate.dtype.itemsize * (world_size - 1) / world_size
    if candidate.scaled is not None and candidate.device_type == "cuda":
        rate *= 2  # of numbers of 8 bits
    return min(sent / link, m * n * k / rate)


def microseconds_to_multiply(device_type: str, multiply_adds: float) -> float:
    """What a matrix product takes, by the same constants."""
    return multiply_adds / _RATES.get(device_type, _RATES["cpu"])[1]


def _current_gpu() -> torch.device:
    """The first one where there is none."""
    return torch.device("cuda", torch.cuda.current_device() if torch.cuda.is_available() else 0)


def _spec(*, scaled: bool = False) -> DeviceSpec:
    """Of the current device, as calls ask for it."""
    return device_spec_of(_current_gpu(), scaled=scaled)
