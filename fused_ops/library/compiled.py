"""What torch.compile is told of the ops: they communicate, so each call is made, once, and in the order of the program.

A compiler may drop, merge and move what computes only. One rank's graph is no other rank's, and a rank may run in eager
mode what another one has compiled, so each of these would make ranks meet in different calls. torch has no single word
for it; an op of weft is kept as torch keeps its own collectives:

- AOTAutograd writes a ``wait_tensor`` after the op (``_functionalized``). torch drops none whose result is unused, and
  moves no collective to what waits for it. Nothing waits: no code comes of it (``inductor.py``).
- It neither merges equal calls, nor calls once more in the backward what is not in an activation checkpoint.
- Inductor takes the ops for collectives, which it leaves in the order of the graph (``inductor.py``).
- The settings under which it does not are refused by name (``communicating.py``).

Not so in activation checkpoints, where torch decides what is called again, and when: it does so alike on all compiled
ranks. All that depends on torch's version stands here, in ``communicating.py`` and in ``inductor.py``; from 2.13 to
2.15 it is the same.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
import torch.distributed._functional_collectives  # it tells torch.fx that waiting is a side effect
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.autograd.graph import increment_version
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy

from .communicating import COMMUNICATING, KEEPS, OF_REGISTERED

_apart = set[OpOverload]()  # those of COMMUNICATING that were in a graph
_wait = torch.ops._c10d_functional.wait_tensor.default
_RECOMPUTED = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def declare_communicating(op: OpOverload) -> None:
    """Tells torch.compile so. Once for each op, when it is defined, or when it is implemented by weft."""
    COMMUNICATING.append(op)
    op.py_impl(FunctionalTensorMode)(_functionalized(op))


def _keep_apart(op: OpOverload) -> None:
    """Has AOTAutograd not merge equal calls, as it merges none of what draws random numbers.

    When a graph with the op is made: what merges is imported with Dynamo, which takes seconds.
    """
    if op not in _apart:
        _apart.add(op)
        _never_merged().extend(_in_graphs(op))


def _never_merged() -> list[Any]:
    from torch._functorch import compile_utils

    return compile_utils.rand_ops


def _in_graphs(op: OpOverload) -> list[Any]:
    """As what AOTAutograd writes it. An op that writes in place is an argument there, which it does not look at: then
    no such op of anybody is merged."""
    if not op._schema.is_mutable:
        return [op.overloadpacket]
    return [torch.ops.higher_order.auto_functionalized, torch.ops.higher_order.auto_functionalized_v2]


def withdraw_communicating(op: OpOverload) -> None:
    """Takes back ``declare_communicating``."""
    COMMUNICATING.remove(op)
    del op.python_key_table[FunctionalTensorMode]
    op._dispatch_cache.clear()
    if op in _apart:
        _apart.remove(op)
        for written in _in_graphs(op):
            _never_merged().remove(written)
    _tell_inductor()


def known_to_inductor(fake: Callable[..., Any]) -> Callable[..., Any]:
    """A fake implementation that also tells Inductor of the ops, once that is there. Importing it takes seconds."""

    @wraps(fake)
    def call(*args: Any, **named: Any) -> Any:
        if (inductor := _tell_inductor()) is not None:
            inductor.refuse_in_lite_mode()
        return fake(*args, **named)

    return call


def _functionalized(op: OpOverload) -> Callable[..., Any]:
    """How AOTAutograd writes the op into a graph: as always, and a wait after it."""

    def call(mode: FunctionalTensorMode, *args: Any, **named: Any) -> Any:
        _tell_inductor()
        _keep_apart(op)
        tensors = [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)]
        result = mode.__torch_dispatch__(op, [*{type(t) for t in tensors}], args, named)
        if result is NotImplemented:
            return result
        if op not in OF_REGISTERED:  # of those a graph keeps copies (inductor.py)
            increment_version(_written(op, args))
        kept = next((t for t in tree_leaves(result) if isinstance(t, Tensor)), None)
        kept = [*_written(op, args), *tensors][0] if op._schema.is_mutable else kept  # written in place
        if kept is None:
            return result
        with mode:
            waited = _wait(kept)
        _mark(op)
        return tree_map_only(Tensor, lambda t: waited if t is kept else t, result)

    return call


def _written(op: OpOverload, args: Sequence[Any]) -> list[Tensor]:
    """What the op writes to. Autograd is told, as in eager mode: a backward that needs what was there before raises."""
    names = zip(op._schema.arguments, args, strict=False)
    return [x for argument, x in names if argument.is_write and isinstance(x, Tensor)]


def _mark(op: OpOverload) -> None:
    """The nodes that were written last, of an op and the wait after it."""
    mode = get_proxy_mode()
    if mode is None:
        return
    for node in _back_to(op, mode.tracer.graph):
        if node.target is _wait:
            node.meta[KEEPS] = True
        elif isinstance(node.meta.get("val"), Tensor) and node.meta.get("recompute") not in _RECOMPUTED:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _back_to(op: OpOverload, graph: fx.Graph) -> Iterator[fx.Node]:
    for node in reversed(graph.nodes):
        yield node
        if node.target is op or op in node.args:
            return


def _tell_inductor() -> Any:
    """``inductor.py``, if Inductor is there."""
    if "torch._inductor.lowering" in sys.modules:
        from . import inductor

        inductor.keep_in_order()
        return inductor
    return None


def _version() -> str:
    """Of what decides how the ops stand in graphs, by which Inductor's caches know graphs that were made otherwise."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


# It is part of the key of all caches, also of AOTAutograd's, which does not look at what an op becomes.
torch.compiler.config.cache_key_tag += f" weft {_version()}"
