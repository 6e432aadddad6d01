"""How long an LL exchange takes by itself, which the estimates of several ops share. Pure functions, no GPU.

Fitted to the CUDA graphs of all_reduce, all_gather, reduce_scatter and all_reduce_rms_norm in bench/results, between 2
and 4 H100 and H200, which differ by less than two runs of one pair do: one set of constants for all.
"""

from __future__ import annotations

#: Microseconds of a launch and of the way to the peers, however little is sent (h200-x2-all_reduce.json, up to 64 KiB),
#: and of a second trip that waits for the first one (the all_reduce files, from two_shot on).
FIRST_TRIP, SECOND_TRIP = 3.2, 1.3
#: Bytes that a rank sends in a microsecond while it receives as many (the same files, from 1 MiB on): of the first FILL
#: and of the others, at the links' rate.
FIRST_RATE, RATE = 320e3, 355e3
FILL = 24e6
#: To the time of an all-reduce that sends as many bytes: an all-gather stores more (h100-x2-all_gather.json,
#: h100-x2-reduce_scatter.json).
ALL_GATHER, REDUCE_SCATTER = 1.1, 1.05


def exchange_time_us(sent: float, trips: int = 1) -> float:
    """Microseconds in which each rank sends so many bytes, in one trip or in two, of which the second has results."""
    return (
        FIRST_TRIP + (trips - 1) * SECOND_TRIP + min(sent, FILL) / FIRST_RATE + max(0.0, sent - FILL) / RATE
    )


def all_reduce_time_us(nbytes: float, world_size: int, form: str) -> float:
    """Microseconds of an all-reduce of so many bytes: "one_shot", all to all, or "two_shot", parts and then results."""
    others = world_size - 1
    if form == "one_shot":
        return exchange_time_us(others * nbytes)
    return exchange_time_us(2 * others * nbytes / world_size, trips=2)


def estimate_all_gather_us(nbytes: int, world_size: int) -> float:
    """Microseconds of an all-gather of parts of ``nbytes``."""
    return exchange_time_us(ALL_GATHER * (world_size - 1) * nbytes)


def estimate_reduce_scatter_us(nbytes: int, world_size: int) -> float:
    """Microseconds of a reduce-scatter of which each rank has a part of ``nbytes``."""
    return exchange_time_us(REDUCE_SCATTER * (world_size - 1) * nbytes)
