"""Tensors on the heap, and their peers."""

from __future__ import annotations

import weakref

import torch

from . import forks
from .failure.fault import fault_of
from .groups import Group, resolve_group
from .heap.heap import Block, heap_of
from .heap.registry import get_heap
from .signals import Pad

_pads: weakref.WeakKeyDictionary[Block, Pad] = weakref.WeakKeyDictionary()


def empty(
    *shape: int,
    dtype: torch.dtype | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised contiguous tensor that every rank of ``group`` can address. Collective.

    Args:
        shape: the sizes, as numbers or as one sequence.
        dtype: default ``torch.get_default_dtype()``.
        group: name, ProcessGroup, 1-D DeviceMesh or (mesh, dim); default the default group.
        device: default torch's default device if that is a GPU; else the current CUDA device for a group with NCCL,
            the CPU for others.

    Raises:
        HeapUnavailable: the ranks cannot address each other's memory.
        RankMismatch: the ranks ask for different sizes or dtypes.
        PeerTimeout: a rank does not come.
        ForkedProcess: this process was forked from the one that joined the group.
        ValueError, TypeError: a size is negative or no integer, there is no such group, dtype or device.
    """
    sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
    for size in sizes:
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"shape: {sizes} has an entry of type {type(size).__name__}, must be integers")
        if size < 0:
            raise ValueError(f"shape: {tuple(sizes)} has a negative size")
        if size >= 1 << 63:
            raise ValueError(f"shape: {tuple(sizes)} has a size of 2**63 or more")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: is {dtype!r}, must be a torch.dtype")
    dtype = dtype or torch.get_default_dtype()
    forks.refuse_child(resolve_group(group), "empty")
    where = get_heap(group, device)
    count = 1
    for size in sizes:
        count *= size
    fault_of(where)  # now: signals are made later, by each rank for itself
    pad = Pad.bytes(where.world_size)
    block = where.allocate(pad + max(1, count * dtype.itemsize), f"empty{tuple(sizes)} {dtype}", zero=pad)
    return where.tensor(where.rank, block.offset + pad, tuple(sizes), dtype, block)


class Peers:
    """What ``rendezvous`` gives: the same tensor on every rank, and signals between the ranks.

    Attributes:
        rank, world_size: of this process in the group.
        tensors: the tensor of each rank, by rank; the local one is the tensor itself.
        pointers: their addresses in this process.
    """

    def __init__(self, tensor: torch.Tensor, block: Block) -> None:
        where = block.heap
        self.rank, self.world_size = where.rank, where.world_size
        # Not data_ptr: a tensor without elements says 0.
        first = tensor.untyped_storage().data_ptr() + int(tensor.storage_offset()) * tensor.element_size()
        offset = first - where.address(where.rank)
        self.pointers = [where.address(rank) + offset for rank in range(where.world_size)]
        self.tensors = [
            tensor
            if rank == where.rank
            else _like(tensor, where.tensor(rank, offset, (_extent(tensor),), tensor.dtype, block))
            for rank in range(where.world_size)
        ]
        self._pad = _pads.get(block) or _pads.setdefault(block, Pad(block))
        self._table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """The pointers as an int64 tensor of shape [world_size] on the device, for kernels."""
        if self._table is None:
            self._table = torch.tensor(
                self.pointers, dtype=torch.int64, device=self.tensors[self.rank].device
            )
        return self._table

    def put(self, peer: int, channel: int = 0) -> None:
        """Tell ``peer`` that everything this rank stored so far, in stream order, may be read."""
        self._pad.put(peer, channel)

    def wait(self, peer: int, channel: int = 0) -> None:
        """Wait for the next ``put`` of ``peer`` on ``channel``; on CUDA the current stream waits.

        Raises:
            PeerTimeout: the deadline passed; on CUDA at the group's next call.
        """
        self._pad.wait(peer, channel)

    def barrier(self, channel: int = 0) -> None:
        """Every rank has come here, and may read what the others stored before they came.

        Raises:
            PeerTimeout: as ``wait``.
        """
        self._pad.barrier(channel)


def rendezvous(tensor: torch.Tensor, group: Group = None) -> Peers:
    """The peers of a tensor made by ``empty``, or of a view of one. Not collective.

    Raises:
        ForkedProcess: this process was forked from the rank's.
        ValueError: the tensor does not lie on a heap, or on that of another group.
        TypeError: it is not a tensor.
    """
    block = heap_of(tensor)
    if block is None:
        raise ValueError("tensor: does not lie on a heap; make it with weft.symm_mem.empty")
    if group is not None and resolve_group(group) is not block.heap.group:
        raise ValueError(f"group: the tensor lies on the heap of group {block.heap.group_name!r}")
    block.heap.owner.refuse_child("rendezvous")
    return Peers(tensor, block)


def _extent(tensor: torch.Tensor) -> int:
    """Elements from a tensor's first to its last one in memory."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _like(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    like = flat.as_strided(tensor.shape, tensor.stride())
    like = like.conj() if tensor.is_conj() else like
    return torch._neg_view(like) if tensor.is_neg() else like
