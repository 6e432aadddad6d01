"""A registered tensor, as users hold it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ... import hooks
from .. import forks
from ..errors import WeftError
from .cross_process import ProcessTensor
from .engine import Access, TransferEngine
from .registry import Registration, Registry


class RegisteredTensor:
    """A tensor of each rank that the others can access: what ``register`` gives.

    >>> import torch
    >>> from weft import symm_mem
    >>> (x,) = symm_mem.register([torch.zeros(4)])  # on each rank
    >>> right, left = ((x.rank + step) % x.world_size for step in (1, -1))
    >>> for turn in range(3):
    ...     x.signal(left)  # the left rank may write to my tensor
    ...     x.put(torch.full((4,), float(turn)), right)  # when the right one lets me
    ...     x.wait(left)  # the left one has written
    ...     assert x.tensor.tolist() == [turn] * 4

    The owner of a tensor lets a peer access it by ``signal``, once for each time. The peer's ``put`` or ``get`` waits
    for that, so the tensor is neither overwritten while its owner reads it nor read before it is filled. The owner's
    ``wait`` waits until the access is over. The n-th of each meets the n-th of the others; signals may run ahead. So
    no barrier is needed, however often it is repeated.

    It keeps the tensor's memory. When all ranks have dropped it, or by ``unregister``, the registration ends.

    Attributes:
        rank: of this process in the group.
        world_size: the number of ranks in the group.
        tensor: this rank's.
        tensors: each rank's, by rank, in this process's address space; None where the kernel copies, between CPU ranks.
        shapes: each rank's, by rank: they may differ.
        number: which registration it is, as errors name it.
    """

    def __init__(
        self, tensor: torch.Tensor, of: Registration, registry: Registry, engine: Callable[[], TransferEngine]
    ) -> None:
        heap = registry.heap
        self.of, self.registry, self._engine, self._heap = of, registry, engine, heap
        self.rank, self.world_size, self.number = heap.rank, heap.world_size, of.number
        self.said = str(of.number)  # to other ranks, at each call that finds it again
        self.tensor, self._group_name = tensor, heap.group_name
        # A graph does not write to what requires a gradient.
        self._in_graphs = tensor.detach() if tensor.requires_grad else tensor
        self.shapes = [torch.Size(place.shape) for place in of.places]
        self._remote: list[torch.Tensor | ProcessTensor] = [
            tensor if rank == heap.rank else _remote(registry, of, rank) for rank in range(heap.world_size)
        ]
        self.tensors = [r if isinstance(r, torch.Tensor) else None for r in self._remote]
        forks.finalize(self, registry.falling.append, of.number)

    def signal(self, peer: int) -> None:
        """Let ``peer`` access this rank's tensor once, when all that this rank has done so far is done.

        >>> import torch
        >>> from weft import symm_mem
        >>> (x,) = symm_mem.register([torch.arange(3.0)])
        >>> right, left = ((x.rank + step) % x.world_size for step in (1, -1))
        >>> x.signal(left)
        >>> x.get(torch.empty(3), right).tolist()
        [0.0, 1.0, 2.0]
        >>> x.wait(left)  # it has read: the tensor may be changed

        In stream order; it does not wait. On CUDA it can be captured in a graph.

        Args:
            peer: a rank of the group, from 0.

        Raises:
            ValueError: ``peer`` is no rank of the group.
            WeftError: the registration has ended, or the group is broken until ``reset``.
            ForkedProcess: this process was forked from the rank's.
        """
        if torch.compiler.is_compiling():
            in_graph("signal", self, self._in_graphs, peer)
            return
        self._check("signal", peer)
        self._engine().signal([(self.of, peer)])

    def wait(self, peer: int) -> None:
        """Wait until the next ``put`` or ``get`` of ``peer`` on this rank's tensor is over.

        >>> import torch
        >>> from weft import symm_mem
        >>> (x,) = symm_mem.register([torch.zeros(2)])
        >>> x.signal(x.rank)
        >>> x.put(torch.ones(2), x.rank)  # a rank may be its own peer
        >>> x.wait(x.rank)

        In stream order: on CUDA the current stream waits.

        Args:
            peer: as for ``signal``.

        Raises:
            PeerTimeout: the deadline passed (``set_timeout``); on CUDA at the group's next call.
            ValueError, WeftError: as ``signal``.
        """
        if torch.compiler.is_compiling():
            in_graph("wait", self, self._in_graphs, peer)
            return
        self._check("wait", peer)
        self._engine().wait([(self.of, peer)])

    def put(self, source: torch.Tensor, peer: int) -> None:
        """Copy ``source`` into the tensor of ``peer``, when that lets this rank.

        >>> import torch
        >>> from weft import symm_mem
        >>> (x,) = symm_mem.register([torch.zeros(2, 3)])
        >>> right, left = ((x.rank + step) % x.world_size for step in (1, -1))
        >>> x.signal(left)
        >>> x.put(torch.ones(3, 2).t(), right)
        >>> x.wait(left)
        >>> x.tensor.sum().item()
        6.0

        In stream order: after it ``source`` may be changed.

        Args:
            source: of the shape and dtype of the peer's tensor, on this rank's device, any strides. It need not be
                registered.
            peer: as for ``signal``.

        Raises:
            PeerTimeout: as ``wait``; ``peer`` has sent no ``signal``.
            ValueError: ``source`` has another shape, dtype or device, or ``peer`` is no rank of the group.
            TypeError: ``source`` is not a tensor.
            WeftError: as ``signal``.
        """
        if torch.compiler.is_compiling():
            in_graph("put", self, self._in_graphs, source, peer)
            return
        self._engine().move([(self.of, self._access("put", "source", source, peer))])

    def get(self, out: torch.Tensor, peer: int) -> torch.Tensor:
        """Copy the tensor of ``peer`` into ``out``, when that lets this rank.

        >>> import torch
        >>> from weft import symm_mem
        >>> (x,) = symm_mem.register([torch.full((2,), 5.0)])
        >>> right, left = ((x.rank + step) % x.world_size for step in (1, -1))
        >>> x.signal(left)
        >>> x.get(torch.empty(2), right).tolist()
        [5.0, 5.0]
        >>> x.wait(left)

        Args:
            out: as ``source`` for ``put``; its elements must not overlap.
            peer: as for ``signal``.

        Returns:
            ``out``.

        Raises:
            PeerTimeout, ValueError, TypeError, WeftError: as ``put``.
        """
        if torch.compiler.is_compiling():
            in_graph("get", self, self._in_graphs, out, peer)
            return out
        self._engine().move([(self.of, self._access("get", "out", out, peer))])
        return out

    def _check(self, op: str, peer: int, name: str = "peer") -> None:
        self._heap.owner.refuse_child(op)
        refuse_peer(name, peer, self.world_size)
        if self.of.closed or self._heap.registrations is not self.registry:
            raise WeftError(f"{op}: the registration of tensor {self.number} has ended")

    def _access(self, op: str, name: str, local: torch.Tensor, peer: int) -> Access:
        self._check(op, peer)
        refuse_other_kind(name, local, self.tensor, f"the tensor of rank {peer}", self.shapes[peer])
        if op == "get":
            refuse_overlap(name, local)
        return Access(op, peer, self._remote[peer], local)


def refuse_peer(name: str, peer: int, world_size: int) -> None:
    """Raises: ValueError: ``peer`` is no rank."""
    if not (isinstance(peer, int) and not isinstance(peer, bool) and 0 <= peer < world_size):
        raise ValueError(f"{name}: is {peer!r}, must be a rank from 0 to {world_size - 1}")


def refuse_other_kind(
    name: str, local: torch.Tensor, mine: torch.Tensor, whose: str, shape: torch.Size | None = None
) -> None:
    """Raises: ValueError, TypeError: ``local`` does not go with a tensor that has mine's dtype and device; its
    ``shape`` may not be known."""
    if not isinstance(local, torch.Tensor):
        raise TypeError(f"{name}: is of type {type(local).__name__}, must be a tensor")
    if local.layout != torch.strided:
        raise ValueError(f"{name}: is {local.layout}, must be strided")
    fits = shape is None or local.shape == shape
    if not fits or local.dtype != mine.dtype or local.device != mine.device:
        sizes = "" if shape is None else list(shape)
        raise ValueError(
            f"{name}: is {local.dtype}{list(local.shape)} on {local.device}, must be as {whose}, "
            f"{mine.dtype}{sizes}, on {mine.device}"
        )


def refuse_overlap(name: str, local: torch.Tensor) -> None:
    """Raises: ValueError: elements of ``local`` overlap."""
    if overlaps_itself(local):
        raise ValueError(f"{name}: has strides {local.stride()}, its elements must not overlap")


def in_graph(op: str, x: RegisteredTensor, *given: Any) -> None:
    """The call of an op of ``torch.ops.weft`` that a graph gets, of x's group."""
    _define_ops()
    getattr(torch.ops.weft, op)(*given, x._group_name, group_size=x.world_size)


def _define_ops() -> None:
    """torch.ops.weft: symm_mem does not import what defines them."""
    hooks.define_ops()


_define_ops._dynamo_marked_constant = True  # type: ignore[attr-defined]


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether an element is there several times, as in an expanded tensor."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _remote(registry: Registry, of: Registration, rank: int) -> torch.Tensor | ProcessTensor:
    place, heap = of.places[rank], registry.heap
    known = registry.table[of.keys[rank]]
    if known.mapping.address is None:
        process = heap.rendezvous.processes[rank]
        return ProcessTensor(process, known.segment.base + place.offset, place)
    return known.mapping.tensor(place, heap.device)
