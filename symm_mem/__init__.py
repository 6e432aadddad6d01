"""Memory that every rank of a group can address: on CUDA through NVLink, on the CPU through shared memory.

>>> x = symm_mem.empty(1024, dtype=torch.bfloat16, group=group)  # collective: an ordinary tensor on the heap
>>> peers = symm_mem.rendezvous(x)
>>> peers.tensors[1 - peers.rank].copy_(mine)  # write to the other rank
>>> peers.barrier()  # everybody has written
"""

from .batches import batch_put, batch_signal, batch_wait
from .errors import CallAbandoned, ForkedProcess, HeapUnavailable, PeerTimeout, RankMismatch, WeftError
from .failure.flight_dump import flight_record
from .groups import Group, group_name, resolve_group
from .heap.registry import check, reset, unavailable
from .heap.stats import HeapStats, stats
from .registration.handle import RegisteredTensor
from .registration.registered import register, unregister
from .switches import is_checked, set_checked, warn_of_unknown_variables
from .tensors import Peers, empty, rendezvous
from .timeouts import get_timeout, set_timeout

__all__ = [
    "CallAbandoned",
    "ForkedProcess",
    "Group",
    "HeapStats",
    "HeapUnavailable",
    "PeerTimeout",
    "Peers",
    "RankMismatch",
    "RegisteredTensor",
    "WeftError",
    "batch_put",
    "batch_signal",
    "batch_wait",
    "check",
    "empty",
    "flight_record",
    "get_timeout",
    "group_name",
    "is_checked",
    "register",
    "rendezvous",
    "reset",
    "resolve_group",
    "set_checked",
    "set_timeout",
    "stats",
    "unavailable",
    "unregister",
]

warn_of_unknown_variables()
