"""The grid and the epochs of an all-gather, and its workspace. Pure functions, no GPU."""

from __future__ import annotations

from functools import lru_cache

from ..device.collective.rounds import RoundsConfig, epoch_of
from ..device.comm.exchange_time import exchange_time_us
from ..device.comm.ll_exchange import BLOCKS

#: To that of an all-reduce that sends as many bytes: more is stored (bench/results/h100-x2-all_gather.json).
_TIME_RATIO = 1.1


@lru_cache(maxsize=4096)
def choose_all_gather(world_size: int, num_sms: int = BLOCKS) -> RoundsConfig:
    """The configuration on ``world_size`` ranks; the same on every rank.

    ``num_sms``: blocks at most. They keep their SMs while they wait for a peer, which may wait for what another stream
    of this rank has to compute first.
    """
    return RoundsConfig(epoch_of(world_size), min(BLOCKS, num_sms), exact=True)


def estimate_all_gather_us(nbytes: int, world_size: int) -> float:
    """Microseconds of an all-gather of parts of ``nbytes``."""
    return exchange_time_us(_TIME_RATIO * (world_size - 1) * nbytes)
