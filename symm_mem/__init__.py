"""Memory that every rank of a group can address: on CUDA through NVLink, on the CPU through shared memory.

>>> x = symm_mem.empty(1024, dtype=torch.bfloat16, group=group)  # collective: an ordinary tensor on the heap
>>> peers = symm_mem.rendezvous(x)
>>> peers.tensors[1 - peers.rank].copy_(mine)  # write to the other rank
>>> peers.barrier()  # everybody has written
"""

from .board import is_checked, set_checked
from .errors import CallAbandoned, HeapUnavailable, PeerTimeout, RankMismatch, WeftError
from .groups import Group, group_name, resolve_group
from .heap import Block, Heap, heap_of
from .peers import Peers, empty, rendezvous
from .registry import check, heap, reset, unavailable
from .timeouts import get_timeout, set_timeout
from .workspace import HALVES, Layout, Workspace

__all__ = [
    "HALVES",
    "Block",
    "CallAbandoned",
    "Group",
    "Heap",
    "HeapUnavailable",
    "Layout",
    "PeerTimeout",
    "Peers",
    "RankMismatch",
    "WeftError",
    "Workspace",
    "check",
    "empty",
    "get_timeout",
    "group_name",
    "heap",
    "heap_of",
    "is_checked",
    "rendezvous",
    "reset",
    "resolve_group",
    "set_checked",
    "set_timeout",
    "unavailable",
]
