"""CUDA programs that a test on GPUs will launch, compiled on all processors before it, rather than one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch
from opcommon import meet, world
from weft.kernels.all_gather_matmul import cuda_kernel as gather_kernel
from weft.kernels.all_gather_matmul.configs import MOST_BS, GatherPushConfig
from weft.kernels.device.jit.program import Program, program_of
from weft.kernels.matmul_reduce_scatter import cuda_kernel as scatter_kernel
from weft.kernels.matmul_reduce_scatter.configs import Epilogue, ScatterPushConfig


def compile_ahead(programs: Iterable[Program]) -> None:
    """Every rank compiles its share of them, which all name alike; then they are on disk for all."""
    rank, size = world().rank(), world().size()
    mine = list(dict.fromkeys(programs))[rank::size]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // size)) as pool:
        list(pool.map(Program.cubin, mine))
    meet()


def gather_programs(
    bs: Sequence[torch.Tensor], config: GatherPushConfig, returned: Sequence[bool]
) -> Iterator[Program]:
    """Of an all-gather + matmul with these Bs, and with A returned or not."""
    for first, return_A in product(range(0, len(bs), MOST_BS), returned):
        some = bs[first : first + MOST_BS]
        defines = gather_kernel.gather_defines(some, config, return_A=return_A and not first)
        yield program_of(gather_kernel.SOURCE, **defines)


def scatter_programs(
    b: torch.Tensor, config: ScatterPushConfig, epilogues: Sequence[Epilogue]
) -> Iterator[Program]:
    """Of a matmul + reduce-scatter with these epilogues, on every rank."""
    size = world().size()
    for rank, epilogue in product(range(size), epilogues):
        defines = scatter_kernel.scatter_defines(b, config, size, rank, epilogue)
        yield program_of(scatter_kernel.SOURCE, **defines)
