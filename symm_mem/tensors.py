"""Tensors on the heap, and their peers."""

from __future__ import annotations

import weakref

import torch

from . import forks
from .failure.fault import fault_of
from .groups import Group, resolve_group
from .heap.heap import Block, heap_of
from .heap.registry import get_heap
from .registration.segments import extent
from .signals import Pad

_pads: weakref.WeakKeyDictionary[Block, Pad] = weakref.WeakKeyDictionary()


def empty(
    *shape: int,
    dtype: torch.dtype | None = None,
    group: Group = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """An uninitialised contiguous tensor that every rank of ``group`` can address. Collective.

    >>> import torch
    >>> from weft import symm_mem
    >>> x = symm_mem.empty(2, 3, dtype=torch.bfloat16)
    >>> x.shape
    torch.Size([2, 3])

    The tensor lies on the group's heap: at the same offset on every rank, in memory that the others map. It keeps its
    memory as any tensor does. ``rendezvous`` gives its peers. torch's own is
    ``torch.distributed._symmetric_memory.empty``.

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

    >>> from weft import symm_mem
    >>> x = symm_mem.empty(4)
    >>> peers = symm_mem.rendezvous(x)
    >>> right = (peers.rank + 1) % peers.world_size
    >>> _ = peers.tensors[right].fill_(peers.rank)  # write to the memory of another rank
    >>> peers.barrier()  # everybody has written
    >>> bool((x == (peers.rank - 1) % peers.world_size).all())
    True

    Signals are words that count, one writer each, in the order of the current stream; 16 channels each way.

    Attributes:
        rank: of this process in the group.
        world_size: the number of ranks in the group.
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
            else _like(
                tensor,
                where.tensor(rank, offset, (extent(tensor.shape, tensor.stride()),), tensor.dtype, block),
            )
            for rank in range(where.world_size)
        ]
        self._pad = _pads.get(block) or _pads.setdefault(block, Pad(block))
        self._table: torch.Tensor | None = None
        self._signal_table: torch.Tensor | None = None

    @property
    def table(self) -> torch.Tensor:
        """The pointers as an int64 tensor of shape [world_size] on the device, for kernels."""
        if self._table is None:
            self._table = self._on_device(self.pointers)
        return self._table

    def _on_device(self, addresses: list[int]) -> torch.Tensor:
        return torch.tensor(addresses, dtype=torch.int64, device=self.tensors[self.rank].device)

    @property
    def signal_table(self) -> torch.Tensor:
        """Addresses of each rank's 32-bit signal words for your own kernels, an int64 tensor of shape [world_size].

        >>> from weft import symm_mem
        >>> symm_mem.rendezvous(symm_mem.empty(4)).signal_table.dtype
        torch.int64

        Each rank has 16 * world_size words, which are 0 at first and after a reset. weft does not use them: ``put``,
        ``wait`` and ``barrier`` count in other words. A kernel writes a peer's word with release semantics at system
        scope, and polls its own with acquire semantics, a bounded number of times. Tensors that share memory have the
        same words.
        """
        if self._signal_table is None:
            words = [self._pad.of_kernels(rank) for rank in range(self.world_size)]
            self._signal_table = self._on_device(words)
        return self._signal_table

    def put(self, peer: int, channel: int = 0) -> None:
        """Tell ``peer`` that everything this rank stored so far, in stream order, may be read.

        >>> from weft import symm_mem
        >>> x = symm_mem.empty(4)
        >>> peers = symm_mem.rendezvous(x)
        >>> right, left = ((peers.rank + step) % peers.world_size for step in (1, -1))
        >>> _ = peers.tensors[right].fill_(peers.rank)
        >>> peers.put(right)
        >>> peers.wait(left)
        >>> x[0].item() == left
        True

        The n-th wait on a channel meets the n-th put; puts may run ahead. On CUDA it is an operation of the current
        stream, and cannot be captured in a CUDA graph.

        Args:
            peer: a rank of the group, from 0.
            channel: 0 to 15.

        Raises:
            ValueError: ``peer`` is no rank of the group, or ``channel`` not from 0 to 15.
            WeftError: the group is broken until ``reset``, or a CUDA graph is being captured.
            ForkedProcess: this process was forked from the rank's.
        """
        self._pad.put(peer, channel)

    def wait(self, peer: int, channel: int = 0) -> None:
        """Wait for the next ``put`` of ``peer`` on ``channel``; on CUDA the current stream waits.

        >>> from weft import symm_mem
        >>> peers = symm_mem.rendezvous(symm_mem.empty(4))
        >>> peers.put((peers.rank + 1) % peers.world_size, channel=3)
        >>> peers.wait((peers.rank - 1) % peers.world_size, channel=3)

        Args:
            peer: as for ``put``.
            channel: as for ``put``.

        Raises:
            PeerTimeout: the deadline passed (``set_timeout``); on CUDA at the group's next call.
            ValueError, WeftError: as ``put``.
        """
        self._pad.wait(peer, channel)

    def barrier(self, channel: int = 0) -> None:
        """Every rank has come here, and may read what the others stored before they came.

        >>> from weft import symm_mem
        >>> x = symm_mem.empty(4).fill_(7)
        >>> peers = symm_mem.rendezvous(x)
        >>> peers.barrier()
        >>> [int(tensor[0]) for tensor in peers.tensors] == [7] * peers.world_size
        True

        A ``put`` to every rank and a ``wait`` for every rank on ``channel``.

        Args:
            channel: as for ``put``.

        Raises:
            PeerTimeout, ValueError, WeftError: as ``wait``.
        """
        self._pad.barrier(channel)


def rendezvous(tensor: torch.Tensor, group: Group = None) -> Peers:
    """The peers of a tensor made by ``empty``, or of a view of one. Not collective.

    >>> from weft import symm_mem
    >>> x = symm_mem.empty(4, 6)
    >>> peers = symm_mem.rendezvous(x[1:3])
    >>> len(peers.tensors) == peers.world_size
    True
    >>> peers.tensors[0].shape
    torch.Size([2, 6])

    Addresses are computed, nothing is exchanged. torch's own is ``torch.distributed._symmetric_memory.rendezvous``.

    Args:
        tensor: any dtype and strides.
        group: the group that the tensor was made for, or None.

    Returns:
        Peers.

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


def _like(tensor: torch.Tensor, flat: torch.Tensor) -> torch.Tensor:
    like = flat.as_strided(tensor.shape, tensor.stride())
    like = like.conj() if tensor.is_conj() else like
    return torch._neg_view(like) if tensor.is_neg() else like
