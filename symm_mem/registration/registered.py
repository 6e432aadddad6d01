"""Ordinary tensors that have peers: what users see of it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses import FakeTensor
from torch.distributed import ProcessGroup

from .. import call_cache, forks
from ..failure.fault import fault_of, refuse_if_broken
from ..groups import Group, resolve_group
from ..heap.heap import Heap
from ..heap.registry import get_heap, has_name, known_heap_of
from ..switches import is_checked
from .engine import TransferEngine, make_engine
from .handle import RegisteredTensor, overlaps_itself
from .registry import Registry


class Registrations(Registry):
    """As handles, which are found again without an exchange."""

    def __init__(self, heap: Heap) -> None:
        super().__init__(heap)
        self.handles: weakref.WeakValueDictionary[Any, RegisteredTensor] = weakref.WeakValueDictionary()
        self._engine: TransferEngine | None = None

    @property
    def engine(self) -> TransferEngine:
        if self._engine is None:
            self._engine = make_engine(self)
        return self._engine

    @property
    def counts(self) -> dict[str, int]:
        """For ``stats``."""
        return {"registered": len(self.entries), "segments": len(self.table), "reserved": self.table.bytes}

    def find_again(self, tensors: Any) -> list[RegisteredTensor] | None:
        """Of tensors all of which are registered; None where that takes a closer look."""
        heap, found = self.heap, []
        if type(tensors) not in (list, tuple) or not has_name(heap.group, heap.group_name) or is_checked():
            return None
        for tensor in tensors:
            if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
                return None
            if (handle := self.handle_of(tensor)) is None or tensor.is_conj() or tensor.is_neg():
                return None
            found.append(handle)
        if not found:
            return None
        heap.owner.refuse_child("register")
        refuse_if_broken(heap)
        self.hits.post(f"tensors [{', '.join([handle.said for handle in found])}]".encode())
        return found

    def handle_of(self, tensor: torch.Tensor) -> RegisteredTensor | None:
        handle = self.handles.get(_key(tensor))
        return None if handle is None or handle.of.closed else handle

    def register(self, given: list[torch.Tensor]) -> list[RegisteredTensor]:
        """As the function of this name."""
        keys = [_key(tensor) for tensor in given]
        found = [self.handle_of(tensor) for tensor in given]
        first = {key: i for i, key in reversed(list(enumerate(keys)))}
        new = [i for i, key in enumerate(keys) if found[i] is None and first[key] == i]
        said = (h.said if h else "new" if i in new else "the same" for i, h in enumerate(found))
        self.hits.post(f"tensors [{', '.join(said)}]".encode())
        if new or is_checked():
            self.hits.compare("register", f"register, call {self.hits.count}")
        if new:
            made = self.add([given[i] for i in new])
            if self.heap.device.type == "cuda":  # its kernels are compiled by all ranks together
                self.heap.prepare("transfers", "transfers of registered tensors", lambda: self.engine)
            try:
                for i, of in zip(new, made, strict=True):
                    found[i] = self.handles[keys[i]] = RegisteredTensor(
                        given[i], of, self, lambda: self.engine
                    )
            except BaseException:  # Ctrl-C: nobody holds what has no handle
                self.falling.extend(of.number for of in made)
                raise
        return [handle or self.handles[key] for handle, key in zip(found, keys, strict=True)]


def register(tensors: Sequence[torch.Tensor], group: Group = None) -> list[RegisteredTensor]:
    """Give ordinary tensors peers: each rank can then access those of the others. Collective.

    >>> import torch
    >>> from weft import symm_mem
    >>> cache, state = torch.zeros(2, 8), torch.zeros(3)  # of any allocator
    >>> shared = symm_mem.register([cache, state])
    >>> [len(each.shapes) == each.world_size for each in shared]
    [True, True]
    >>> symm_mem.register([cache])[0] is shared[0]  # found again, without an exchange
    True
    >>> symm_mem.unregister(shared)

    All ranks call it with as many tensors of the same dtypes; sizes and strides may differ. The memory is not moved.
    Peers reach a whole segment of it at once, so more tensors in a segment cost no further mapping:

    - on CUDA memory of cudaMalloc by CUDA IPC; of expandable segments and pools by its physical handles,
    - between CPU ranks shared memory, and the group's heap; any other memory by copies that the kernel makes between
      processes, if the machine allows that.

    Tensors that are registered already are found without an exchange, which must be so on all ranks.

    Args:
        tensors: on one device, not overlapping themselves; views are taken as they are.
        group: name, ProcessGroup, 1-D DeviceMesh or (mesh, dim); default the default group.

    Returns:
        a RegisteredTensor for each.

    Raises:
        HeapUnavailable: the ranks cannot address each other's memory.
        RankMismatch: ranks come with other dtypes or another number of tensors, or a rank has registered a tensor
            already that another has not.
        PeerTimeout: a rank does not come.
        WeftError: the memory of a rank cannot be a peer's, with its reason.
        ForkedProcess: this process was forked from the one that joined the group.
        ValueError, TypeError: ``tensors`` is empty or no sequence of strided tensors of one device, or there is no
            such group.
    """
    cache, name = call_cache.cached_calls, group
    if isinstance(group, ProcessGroup):
        name = group.group_name  # a key must not keep the group
    plain = name is None or isinstance(name, str)
    by = cache.get((register, name)) if plain else None
    if (
        by is not None
        and (name is group or by.heap.group is group)
        and (hit := by.find_again(tensors)) is not None
    ):
        return hit
    given = _given(tensors)
    forks.refuse_child(resolve_group(group), "register")
    heap = get_heap(group, given[0].device)
    refuse_if_broken(heap)
    if (by := heap.registrations) is None:
        fault_of(heap)
        by = heap.make_once("registrations", Registrations, "register")
    found = by.register(given)
    if plain:
        call_cache.keep(cache, (register, name), by)
    return found


def unregister(registered: Sequence[RegisteredTensor]) -> None:
    """End registrations on all ranks: no rank can access the tensors of the others any more. Collective.

    >>> import torch
    >>> from weft import symm_mem
    >>> shared = symm_mem.register([torch.zeros(2)])
    >>> symm_mem.unregister(shared)
    >>> try:
    ...     shared[0].signal(0)
    ... except symm_mem.WeftError as error:
    ...     print("it has ended:", "has ended" in str(error))
    it has ended: True

    This rank's queued work is waited for first. Without it a registration ends once all ranks have dropped it, at the
    next ``register`` or ``unregister``.

    Args:
        registered: what ``register`` has given for tensors of one group, the same ones on all ranks.

    Raises:
        RankMismatch: a rank names others.
        PeerTimeout: a rank does not come.
        WeftError: a registration has ended already, or a CUDA graph is being captured, or was and uses a tensor.
        ForkedProcess: this process was forked from the rank's.
        ValueError, TypeError: they are of several groups, or no RegisteredTensor.
    """
    if not isinstance(registered, (list, tuple)):
        raise TypeError(
            f"registered: is of type {type(registered).__name__}, must be a list of RegisteredTensor"
        )
    for handle in registered:
        if not isinstance(handle, RegisteredTensor):
            raise TypeError(f"registered: has a {type(handle).__name__}, must be RegisteredTensor")
    if not registered:
        return
    registry = registered[0].registry
    if any(handle.registry is not registry for handle in registered):
        raise ValueError("registered: are of several groups or devices, must be of one")
    heap = registry.heap
    heap.owner.refuse_child("unregister")
    refuse_if_broken(heap)
    for handle in registered:
        handle._check("unregister", handle.rank)
    registry.end(sorted({handle.number for handle in registered}))


def registered_as(tensor: torch.Tensor, group: str) -> RegisteredTensor | None:
    """What ``register`` has given for the tensor in the group of this name; None if it is not registered.

    Raises:
        ValueError: there is no such group.
    """
    heap = known_heap_of(group, tensor.device)
    if heap is None or heap.registrations is None:
        return None
    found: RegisteredTensor | None = heap.registrations.handle_of(tensor)
    return found


def _given(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if not isinstance(tensors, (list, tuple)):
        raise TypeError(f"tensors: is of type {type(tensors).__name__}, must be a list or tuple of tensors")
    if not tensors:
        raise ValueError("tensors: is empty, must hold a tensor")
    for i, tensor in enumerate(tensors):
        name = f"tensors[{i}]"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or isinstance(tensor, FakeTensor):
            raise TypeError(
                f"{name}: is of type {type(tensor).__name__}, must be a torch.Tensor or Parameter"
            )
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise ValueError(f"{name}: is {tensor.layout}, must be strided and not quantized")
        if tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{name}: is a conjugated or negated view, must be resolved (resolve_conj, resolve_neg)"
            )
        if overlaps_itself(tensor):
            raise ValueError(f"{name}: has strides {tensor.stride()}, its elements must not overlap")
        if tensor.device != tensors[0].device or tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{name}: is on {tensor.device}, must be on the CPU or a CUDA device, as tensors[0], on "
                f"{tensors[0].device}"
            )
    return list(tensors)


def _key(tensor: torch.Tensor) -> Any:
    # While a tensor is registered nothing else comes to lie at its address. One without elements has none.
    place = tensor.data_ptr() if tensor.numel() else -id(tensor)
    return place, tensor.dtype, tensor.shape, tensor.stride()
