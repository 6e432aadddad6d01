"""Where in the model a node of a graph comes from: its line and its module, as torch notes them."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx

from .graph.collectives import group_of, kind_of
from .graph.nodes import between, is_val, val

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)\n\s*(?P<code>.*)')
_TORCH = str(Path(torch.__file__).parent)
# Of a node of a backward graph the stack is that of the forward node whose gradient it computes.
_STACKS = ("nn_module_stack", "fwd_nn_module_stack")
_ROOT = re.compile(r"^L\['\w+'\]")
_CHILD = re.compile(r"\._modules\['([^']*)'\]|\['?([^'\]]*)'?\]")
# What AOTAutograd's partitioner has noted of a node, and what that node stands for.
_PARTITIONED = ("partitioner_tag", "recompute", "ac_graph_id", "seq_nr", "autograd_backward")
_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module")


def source_of(node: fx.Node) -> str:
    """``file:line in function: code`` of the innermost frame outside of torch, or ""."""
    trace = node.meta.get("stack_trace")
    if not isinstance(trace, str):
        return ""
    frames = list(_FRAME.finditer(trace))
    outside = [f for f in frames if not f["file"].startswith(_TORCH)] or frames
    if not outside:
        return ""
    frame = outside[-1]
    return f"{Path(frame['file']).name}:{frame['line']} in {frame['function']}: {frame['code'].strip()}"


def module_of(node: fx.Node) -> str:
    """``layers.3.mlp.down_proj (Linear)``: the innermost module that runs the node, or ""."""
    stack = next((found for key in _STACKS if (found := node.meta.get(key))), None)
    if not stack:
        return ""
    path, kind = list(stack.values())[-1]
    path = _CHILD.sub(lambda m: f".{m[1] or m[2]}", _ROOT.sub("", str(path)))
    path = ".".join(part for part in path.split(".") if part and part not in _WRAPPERS)
    name = kind.__name__ if isinstance(kind, type) else str(kind).rpartition(".")[2]
    return f"{path} ({name})" if path else name


def copy_origin(node: fx.Node, new: fx.Node) -> None:
    """``new``, which stands in place of ``node``, comes from where that came from."""
    new.meta |= {key: node.meta[key] for key in ("stack_trace", *_STACKS) if key in node.meta}


@contextlib.contextmanager
def put_for(node: fx.Node) -> Iterator[None]:
    """What is put before the node meanwhile comes from where that came from, and belongs to the same part of a joint
    graph."""
    before = node.prev
    yield
    for new in between(before, node):
        copy_origin(node, new)
        new.meta |= {key: node.meta[key] for key in _PARTITIONED if key in node.meta}


def fields_of(node: fx.Node) -> dict[str, Any]:
    """What is known of a collective, but for the number of its graph."""
    return {
        "graph": 0,
        "node": node.name,
        "collective": kind_of(node),
        "group": group_of(node),
        "source": source_of(node),
        "module": module_of(node),
        "nbytes": _nbytes_of(node),
    }


def _nbytes_of(node: fx.Node) -> int | None:
    """Of the whole tensor, which an all-gather returns and the others take."""
    sizes = [val(n).numel() * val(n).element_size() for n in (node, *node.all_input_nodes[:1]) if is_val(n)]
    return max(sizes) if sizes and all(isinstance(size, int) for size in sizes) else None
