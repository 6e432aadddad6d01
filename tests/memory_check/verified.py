"""Runs whose compiled graphs verify their memory: the graph against the prediction, its code against Inductor's plan.

    run_ranks(verified, 2, fn, *args)  # as run_ranks(fn, 2, *args), on ranks that do
    with verifying(): ...              # in this process

At its first run a graph is interpreted first. Everything in it then runs once more, collectives too, so all ranks must
verify and compile the same graphs. Its inputs are copied, and random numbers are drawn as without it. A graph with
symbolic sizes is not interpreted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from memory_check import report
from memory_check.verifier import MemoryVerifier
from torch import Tensor, fx
from torch._library.fake_class_registry import FakeScriptObject
from weft.fused_ops.passes.agreement.fallback import is_fallback_graph
from weft.fused_ops.passes.fusion import FusionPass
from weft.fused_ops.passes.graph.collectives import communicates

_log = logging.getLogger("weft.passes")
_graphs: dict[str, MemoryVerifier | None] = {}  # None: verified
_numbers = itertools.count()


def verified(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(rank, world, *args)``, with all that is compiled in it verified."""
    with verifying():
        return fn(rank, world, *args)


def verified_in_part(rank: int, world: int, fn: Callable[..., Any], *args: Any) -> Any:
    """The same, where some of it cannot be."""
    with verifying(may_skip=True):
        return fn(rank, world, *args)


@contextlib.contextmanager
def verifying(*, may_skip: bool = False) -> Iterator[None]:
    """What is compiled verifies itself, before everything else that it does and while its code runs.

    Args:
        may_skip: what cannot be verified runs all the same; else it is an error.
    """
    change, key = FusionPass.__call__, FusionPass.uuid

    def change_and_verify(self: FusionPass, graph: fx.Graph) -> None:
        change(self, graph)
        if not is_fallback_graph() and any(map(communicates, graph.nodes)):
            from memory_check.watched_code import watch_code  # Inductor's part of it

            watch_code(graph)
            _verify_first(graph)

    def no_key(self: FusionPass) -> Any:
        """What is verified is in this process."""
        return key(self) if is_fallback_graph() else None

    with (
        mock.patch.multiple(FusionPass, __call__=change_and_verify, uuid=no_key),
        mock.patch.object(report, "may_skip", may_skip),
    ):
        yield


def _verify_first(graph: fx.Graph) -> None:
    inputs = [n for n in graph.nodes if n.op == "placeholder"]
    # A mesh, which a graph may get to return it.
    given = [n for n in inputs if not isinstance(n.meta.get("val"), FakeScriptObject)]
    if not given or not all(isinstance(n.meta.get("val"), Tensor) for n in given):
        report.not_verified("a graph", "it has symbolic sizes, or no inputs")
        return
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    output = copy.output_node()
    for mine, theirs in zip(copy.find_nodes(op="placeholder"), inputs, strict=True):
        if theirs not in given:
            output.args = fx.node.map_arg(output.args, lambda n, own=mine: None if n is own else n)
            copy.erase_node(mine)
    for done in (torch.ops.weft.agree.default, torch.ops.weft.record.default):  # they have taken place
        for node in copy.find_nodes(op="call_function", target=done):
            copy.erase_node(node)
    owner = graph.owning_module
    module = fx.GraphModule(torch.nn.Module() if owner is None else owner, copy)
    key = f"{os.getpid()} {next(_numbers)}"
    _graphs[key] = MemoryVerifier(module)
    from weft.fused_ops.library.inductor import lower_as_collective  # it takes seconds outside of Inductor

    lower_as_collective(_verify)  # so that it stays before the graph's collectives
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        graph.call_function(_verify, (given, key)).meta["val"] = None


def _verify_now(inputs: list[Tensor], key: str) -> None:
    """
    Raises:
        AssertionError: the graph's memory is not as predicted.
    """
    verifier = _graphs.get(key)
    if verifier is None:
        return
    _graphs[key] = None
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with torch.random.fork_rng(devices), torch.no_grad():
        found = verifier.verify([_copied(t) for t in inputs])
    _log.info("memory verified: peak %d bytes, %d predicted", max(found.measured), max(found.predicted))
    if found.problems:
        raise AssertionError(f"a compiled graph's memory is not as predicted: {report.shown(found.problems)}")


def _copied(tensor: Tensor) -> Tensor:
    """With the same strides and offset, in memory of its own."""
    storage = tensor.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


_lib = torch.library.Library("weft_memory", "FRAGMENT")
_lib.define("verify_memory(Tensor[] inputs, str key) -> ()")
_lib.impl("verify_memory", _verify_now, "CompositeExplicitAutograd")
torch.library.register_fake("weft_memory::verify_memory", lambda inputs, key: None, lib=_lib)
_verify = torch.ops.weft_memory.verify_memory.default
fx.node.has_side_effect(_verify)
