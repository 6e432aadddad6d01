"""Several calls of registered tensors at once: as many signals, puts or waits, which share a launch on CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from .registration.handle import RegisteredTensor, in_graph

Put: TypeAlias = tuple[RegisteredTensor, torch.Tensor, int]
Pair: TypeAlias = tuple[RegisteredTensor, int]


def batch_put(puts: Sequence[Put]) -> None:
    """Several ``put`` at once: on CUDA in one launch, as far as they are small.

    >>> import torch
    >>> from weft import symm_mem
    >>> a, b = symm_mem.register([torch.zeros(4), torch.zeros(2)])
    >>> right, left = ((a.rank + step) % a.world_size for step in (1, -1))
    >>> symm_mem.batch_signal([(a, left), (b, left)])
    >>> symm_mem.batch_put([(a, torch.ones(4), right), (b, torch.ones(2), right)])
    >>> symm_mem.batch_wait([(a, left), (b, left)])
    >>> a.tensor.sum().item() + b.tensor.sum().item()
    6.0

    Each waits for its own ``signal`` and tells its own ``wait``. They are in no order among each other: none may depend
    on what the owner does after another one.

    Args:
        puts: for each what ``put`` takes, as (registered tensor, source, peer): all of one group, and one for each
            tensor of a rank.

    Raises:
        PeerTimeout, WeftError: as ``put``.
        ValueError, TypeError: as ``put``; they are of several groups, or two go into the same tensor of a rank.
    """
    given = _given("puts", puts, ("registered tensor", "source", "peer"))
    if not given:
        return
    handles, sources, peers = zip(*given, strict=True)
    if torch.compiler.is_compiling():
        in_graph("batch_put", handles[0], [x._in_graphs for x in handles], list(sources), list(peers))
        return
    accesses = [
        (x.of, x._access("batch_put", f"puts[{i}]: source", source, peer))
        for i, (x, source, peer) in enumerate(given)
    ]
    _refuse_twice("puts", list(zip(handles, peers, strict=True)))
    handles[0]._engine().move(accesses)


def batch_signal(signals: Sequence[Pair]) -> None:
    """Several ``signal`` at once: on CUDA in one launch.

    >>> import torch
    >>> from weft import symm_mem
    >>> a, b = symm_mem.register([torch.zeros(4), torch.ones(2)])
    >>> symm_mem.batch_signal([(a, a.rank), (b, b.rank)])
    >>> b.get(torch.empty(2), b.rank).tolist()
    [1.0, 1.0]

    Args:
        signals: (registered tensor, peer) for each: all of one group, and none twice.

    Raises:
        WeftError: as ``RegisteredTensor.signal``.
        ValueError, TypeError: as that; they are of several groups, or one is there twice.
    """
    if given := _calls_now("batch_signal", "signals", signals):
        given[0][0]._engine().signal([(x.of, peer) for x, peer in given], "batch_signal")


def batch_wait(waits: Sequence[Pair]) -> None:
    """Several ``wait`` at once: on CUDA in one launch.

    >>> import torch
    >>> from weft import symm_mem
    >>> a, b = symm_mem.register([torch.zeros(4), torch.zeros(2)])
    >>> for x in (a, b):
    ...     x.signal(x.rank)
    ...     x.put(torch.ones(x.tensor.shape), x.rank)
    >>> symm_mem.batch_wait([(a, a.rank), (b, b.rank)])

    Args:
        waits: as ``signals`` of ``batch_signal``.

    Raises:
        PeerTimeout, WeftError: as ``RegisteredTensor.wait``.
        ValueError, TypeError: as ``batch_signal``.
    """
    if given := _calls_now("batch_wait", "waits", waits):
        given[0][0]._engine().wait([(x.of, peer) for x, peer in given], "batch_wait")


def _calls_now(op: str, name: str, values: Any) -> list[Pair]:
    """What ``op`` is to be made for, checked: nothing while a graph is compiled, which gets it as an op."""
    given = _given(name, values, ("registered tensor", "peer"))
    if given and torch.compiler.is_compiling():
        xs, peers = zip(*given, strict=True)
        in_graph(op, xs[0], [x._in_graphs for x in xs], list(peers))
        return []
    for i, (x, peer) in enumerate(given):
        x._check(op, peer, f"{name}[{i}]: peer")
    _refuse_twice(name, given)
    return given


def _given(name: str, values: Any, parts: tuple[str, ...]) -> list[Any]:
    """``values`` as tuples that begin with a RegisteredTensor, all of one group."""
    said = f"({', '.join(parts)})"
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name}: is of type {type(values).__name__}, must be a list of {said}")
    for i, value in enumerate(values):
        is_tuple = isinstance(value, (list, tuple))
        if not is_tuple or len(value) != len(parts) or not isinstance(value[0], RegisteredTensor):
            kinds = (
                f"({', '.join(type(part).__name__ for part in value)})" if is_tuple else type(value).__name__
            )
            raise TypeError(f"{name}[{i}]: is of type {kinds}, must be {said}")
        if value[0].registry is not values[0][0].registry:
            raise ValueError(f"{name}[{i}]: is of another group or device than {name}[0], must be of one")
    return [tuple(value) for value in values]


def _refuse_twice(name: str, given: list[Pair]) -> None:
    pairs = [(x.number, peer) for x, peer in given]
    for i, pair in enumerate(pairs):
        if (first := pairs.index(pair)) < i:
            raise ValueError(
                f"{name}[{i}]: is of the same tensor and rank as {name}[{first}], must be a call of its own"
            )
