"""Parts that all ranks exchange in one shot, beside products of cuBLAS: the host's side of one_shot.cuh."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import Structure
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from .gemm import Defines
from .program import Program

VECTOR = 16  #: bytes
MOST_BYTES = 32 << 20  #: gathered or scattered in all; beyond, what hides the sending behind the product wins

_THREADS = 512  # of a block, as in one_shot.cuh
# Microseconds of an exchange of nothing, and bytes that a rank sends a microsecond: an estimate of exchanges of up to
# 16 MiB between H200s, not fitted to measurements of these kernels.
_EXCHANGE, _RATE = 5.0, 300e3


@dataclass(frozen=True)
class OneShotConfig:
    """``blocks`` exchange parts, each a range of every part with a flag of its own. The same on all ranks."""

    blocks: int


def config(part: int, num_sms: int) -> OneShotConfig:
    """For parts of so many bytes: a vector for each thread at least."""
    return OneShotConfig(min(num_sms, -(-part // (_THREADS * VECTOR))))


def exchange_us(sent: int) -> float:
    """Microseconds of an exchange in which each rank sends so many bytes."""
    return _EXCHANGE + sent / _RATE


@cache
def program(path: Path, defines: Defines) -> Program:
    """A kernel around one_shot.cuh; one for each set of defines."""
    return Program(path, defines=dict(defines))


def launches(
    program: Program, name: str, params: Sequence[Structure], config: OneShotConfig
) -> list[Callable[[int], None]]:
    """A launch for each argument, on a stream."""
    function = program.function(name)
    return [function.bound(config.blocks, _THREADS, p) for p in params]
