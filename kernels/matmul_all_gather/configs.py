"""How a product is cut whose columns all ranks get, and whether copy engines should send it. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ...symm_mem.layout import Layout
from ..device.comm.copy_engine import CALL_US, PEER_US, STARTS_US
from ..device.comm.exchange_time import exchange_time_us
from ..device.device_spec import H200, DeviceSpec, device_spec_of
from ..device.gemm import gemm_tiles

MOST_PIECES = 8
_LEAST_US = 150  # of a piece's product: the host takes 100 us for each
_CUT = 128  # columns or rows that a piece has a multiple of
_COPIED = 0.8  # of memory bandwidth, that torch's copy of a piece gets: not fitted


class MatmulAllGatherKernelCall(NamedTuple):
    """A call as it is launched: A [m, K] and this rank's B [K, N]."""

    a: torch.Tensor
    b: torch.Tensor

    def problem(self, world_size: int) -> MatmulAllGatherProblem:
        (m, k), n = self.a.shape, self.b.shape[1]
        return MatmulAllGatherProblem(
            m, n, k, world_size, self.a.dtype.itemsize, device_spec_of(self.a.device)
        )


@dataclass(frozen=True)
class MatmulAllGatherProblem:
    """Of [m, K] @ [K, N] of each rank. ``itemsize``: bytes of a number."""

    m: int
    n: int
    k: int
    world_size: int
    itemsize: int = 2
    spec: DeviceSpec = H200

    @property
    def part(self) -> int:
        """Bytes of a rank's product."""
        return self.m * self.n * self.itemsize

    @property
    def of_columns(self) -> bool:
        """Whether pieces have all rows of some columns; else all columns of some rows."""
        return self.n >= self.m

    def pieces(self) -> list[tuple[slice, slice]]:
        """Rows and columns of what is multiplied and sent together; none where the whole is too small."""
        whole = self.n if self.of_columns else self.m
        count = min(MOST_PIECES, int(_product_us(self) / _LEAST_US), whole // _CUT)
        if count < 2:
            return []
        step = -(-whole // (count * _CUT)) * _CUT
        cuts = [slice(at, min(at + step, whole)) for at in range(0, whole, step)]
        if self.of_columns:
            return [(slice(0, self.m), cut) for cut in cuts]
        return [(cut, slice(0, self.n)) for cut in cuts]

    @property
    def most_in_piece(self) -> int:
        """Bytes of the largest one."""
        return max((r.stop - r.start) * (c.stop - c.start) for r, c in self.pieces()) * self.itemsize


def copied_pieces_layout(problem: MatmulAllGatherProblem) -> Layout:
    """The workspace: a slot for a piece of each rank, and a flag."""
    return Layout(problem.world_size, 1, problem.world_size * problem.most_in_piece)


def estimate_copied_pieces_us(problem: MatmulAllGatherProblem) -> float:
    """Microseconds: pieces are sent while the next ones are multiplied, and copied to where they belong."""
    p, count = problem, len(problem.pieces())
    moved = (p.world_size - 1) * p.part
    product, sending = _product_us(p), moved / gemm_tiles.LINK
    overlapped = max(product + sending / count, product / count + sending)
    launches = count * (CALL_US + PEER_US * (p.world_size - 1))
    return overlapped + launches + STARTS_US + 2 * moved / (_COPIED * p.spec.memory)


def estimate_gathered_after_us(problem: MatmulAllGatherProblem) -> float:
    """Microseconds of the product and the kernel of one_shot_all_gather after it."""
    return _product_us(problem) + exchange_time_us((problem.world_size - 1) * problem.part)


def copied_pieces_save_us(problem: MatmulAllGatherProblem) -> float:
    """Microseconds by which copy engines are predicted to beat that, or NCCL's gather and the transposition of what it
    gives; 0 of what is too small for them."""
    p = problem
    if not p.pieces():
        return 0.0
    by_nccl = gemm_tiles.nccl_us((p.world_size - 1) * p.part) + 2 * p.world_size * p.part / (
        _COPIED * p.spec.memory
    )
    return min(estimate_gathered_after_us(p), _product_us(p) + by_nccl) - estimate_copied_pieces_us(p)


def _product_us(p: MatmulAllGatherProblem) -> float:
    return gemm_tiles.matmul_us(p.m, p.n, p.k, p.spec) * p.itemsize / 2
