"""``WEFT_VERIFY_MEMORY=1``: a graph's memory is compared with the prediction, and its code's with what was planned.

At its first run a graph is interpreted first. Everything in it then runs once more, collectives too, so all ranks must
set it and compile the same graphs. Its inputs are copied, and random numbers are drawn as without it. A graph with
symbolic sizes is not interpreted.
"""

from __future__ import annotations

import itertools
import logging
import os

import torch
from torch import Tensor, fx

from ....symm_mem import WeftError
from .verifier import MemoryVerifier

_log = logging.getLogger("weft.passes")
_SHOWN = 5  # problems in an error
_FLAGS = {"": False, "0": False, "1": True}

_graphs: dict[str, MemoryVerifier | None] = {}  # None: verified
_numbers = itertools.count()


def verifies() -> bool:
    """Whether graphs are verified.

    Raises:
        ValueError: WEFT_VERIFY_MEMORY is neither 0 nor 1.
    """
    text = os.environ.get("WEFT_VERIFY_MEMORY", "")
    if text not in _FLAGS:
        raise ValueError(f"WEFT_VERIFY_MEMORY: is {text!r}, must be 0 or 1")
    return _FLAGS[text]


def verify_memory(graph: fx.Graph) -> None:
    """Has the graph verify itself in front of everything else that it does, and its code while it runs."""
    from .watched_code import watch_code  # Inductor's part of it

    watch_code(graph)
    _verify_first(graph)


def _verify_first(graph: fx.Graph) -> None:
    given = [n for n in graph.nodes if n.op == "placeholder"]
    if not given or not all(isinstance(n.meta.get("val"), Tensor) for n in given):
        _log.info("memory is not verified of a graph with symbolic sizes, or without inputs")
        return
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    for vote in copy.find_nodes(op="call_function", target=torch.ops.weft.agree.default):
        copy.erase_node(vote)  # it has taken place
    owner = graph.owning_module
    module = fx.GraphModule(torch.nn.Module() if owner is None else owner, copy)
    key = f"{os.getpid()} {next(_numbers)}"
    _graphs[key] = MemoryVerifier(module)
    from ...library.inductor import lower_as_collective  # it takes seconds outside of Inductor

    lower_as_collective(_verify)  # so that it stays in front of the graph's collectives
    with graph.inserting_before(next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))):
        graph.call_function(_verify, (given, key)).meta["val"] = None


def _verify_now(inputs: list[Tensor], key: str) -> None:
    """
    Raises:
        WeftError: the graph's memory is not as predicted.
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
        more = len(found.problems) - _SHOWN
        said = "; ".join(found.problems[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        raise WeftError(f"WEFT_VERIFY_MEMORY: a compiled graph's memory is not as predicted: {said}")


def _copied(tensor: Tensor) -> Tensor:
    """With the same strides and offset, in memory of its own."""
    storage = tensor.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())  # type: ignore[call-overload]


_lib = torch.library.Library("weft", "FRAGMENT")
_lib.define("verify_memory(Tensor[] inputs, str key) -> ()")
_lib.impl("verify_memory", _verify_now, "CompositeExplicitAutograd")
torch.library.register_fake("weft::verify_memory", lambda inputs, key: None, lib=_lib)
_verify = torch.ops.weft.verify_memory.default
fx.node.has_side_effect(_verify)
