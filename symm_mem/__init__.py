"""Memory that every rank of a group can address: on CUDA through NVLink, on the CPU through shared memory.

>>> x = symm_mem.empty(1024, dtype=torch.bfloat16, group=group)  # collective: an ordinary tensor on the heap
>>> peers = symm_mem.rendezvous(x)
>>> peers.tensors[1 - peers.rank].copy_(mine)  # write to the other rank
>>> peers.barrier()  # everybody has written
"""

from .errors import HeapUnavailable, PeerTimeout, RankMismatch, WeftError
from .groups import Group, group_name, resolve_group
from .heap import Block, Heap, check, heap, heap_of, unavailable
from .peers import Peers, empty, rendezvous
from .timeouts import get_timeout, set_timeout
from .workspace import HALVES, Layout, Workspace

__all__ = [
    "HALVES",
    "Block",
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
    "rendezvous",
    "resolve_group",
    "set_timeout",
    "unavailable",
]
