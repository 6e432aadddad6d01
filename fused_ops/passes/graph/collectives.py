"""The collectives of a graph, and what waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from ....kernels.device.gemm.scaling import FP8
from ....symm_mem import resolve_group
from ... import validation
from ...library import schema
from .nodes import LeftAlone, arguments_of, between, c10d, calls, is_val, memory, only_user, some, val, what
from .sizes import known

_WAITS = ("wait_tensor", "wait_tensors")
_COPIED = {schema.all_gather_start, schema.reduce_scatter_start}  # by copy engines
_COPIED_WAITS = {schema.all_gather_wait, schema.reduce_scatter_wait}
_EXCHANGE = c10d.all_to_all_single.default
_FUSIBLE = {
    c10d.all_gather_into_tensor.default,
    c10d.reduce_scatter_tensor.default,
    c10d.all_reduce.default,
    _EXCHANGE,
}
# What to do where a graph break has parted a collective from its product.
COMPILE_BOTH = (
    "compile the module that holds both (an nn.Sequential that is compiled itself has a graph for each child)"
)


@dataclass(frozen=True)
class Collective:
    """A functional collective of one tensor over a named group, and the node that waits for it."""

    node: fx.Node
    wait: fx.Node
    x: fx.Node
    group: str
    world: int
    reduce_op: str

    @property
    def sums(self) -> bool:
        """Whether it adds or averages: not of an all-gather, nor of an all-reduce by max or min."""
        return self.reduce_op in validation.REDUCE_OPS

    @property
    def beside(self) -> fx.Node | None:
        """What takes its time after it before somebody waits for it: it makes as many elements, or sends."""
        for node in between(self.node, self.wait):
            if communicates(node):
                return node
            made = is_val(node) and not any(
                is_val(a) and memory(a) == memory(node) for a in node.all_input_nodes
            )
            if made and not known(val(node).numel() < val(self.x).numel()):
                return node
        return None

    @classmethod
    def from_node(cls, node: fx.Node, groups: frozenset[str] | None = None) -> Collective:
        """LeftAlone: it is none that can be fused, or of none of the ``groups``; None for all."""
        if isinstance(out := node.kwargs.get("out"), fx.Node):
            raise LeftAlone(
                f"it writes into {what(out)}, which others may use, or which has strides of its own"
            )
        if node.target not in _FUSIBLE:
            raise LeftAlone(
                "weft fuses all_gather, reduce_scatter, all_reduce and all_to_all of one tensor into new memory only"
            )
        group = group_of(node)
        if group is None:
            given = arguments_of(node).get("group_name")
            raise LeftAlone(f"its group is not given by name but as {type(given).__name__}")
        if groups is not None and group not in groups:
            raise LeftAlone("its group is none of those this pass is for")
        try:
            world = resolve_group(group).size()
        except ValueError as e:
            raise LeftAlone(str(e)) from e
        if world == 1:
            raise LeftAlone("its group has one rank")
        exchanges = node.target is _EXCHANGE
        size = world if node.target is c10d.all_reduce.default else node.args[-2]
        if exchanges:
            size = len(node.args[1])  # type: ignore[arg-type]
        if size != world:
            raise LeftAlone(f"it is for {size} ranks, the group has {world}")
        x = node.args[0]
        if not is_val(x):
            raise LeftAlone("the shape of its input is not known")
        if val(x).device.type not in ("cpu", "cuda"):
            raise LeftAlone(f"its input lies on {val(x).device}")
        if exchanges and not _has_even_parts(node):
            raise LeftAlone("its parts are uneven")
        gathers = node.target is c10d.all_gather_into_tensor.default
        if val(x).dtype not in validation.DTYPES and not (gathers and val(x).dtype in FP8):
            raise LeftAlone(f"its input is {val(x).dtype}, not float32, bfloat16 or float16")
        reduce_op = "" if gathers or exchanges else str(node.args[1])
        scatters = node.target is c10d.reduce_scatter_tensor.default
        taken = validation.REDUCE_OPS if scatters else validation.ALL_REDUCE_OPS
        if reduce_op and reduce_op not in taken:
            raise LeftAlone(f"it reduces by {reduce_op!r}, not {' or '.join(map(repr, taken))}")
        # ``canonicalize.py`` has left one wait, and no other use that can be without.
        wait = only_user(node)
        if not calls(wait, c10d.wait_tensor.default):
            others = [u for u in node.users if u.op != "output" and not calls(u, c10d.wait_tensor.default)]
            raise LeftAlone(
                f"it is used without waiting, by {some(others)}" if others else "nobody waits for it"
            )
        val(wait)
        return cls(node, wait, x, group, world, reduce_op)


def _has_even_parts(node: fx.Node) -> bool:
    """Of an all-to-all: whether each rank sends each rank as many rows."""
    x, to, of = node.args[:3]
    sizes = [s.meta["val"] if isinstance(s, fx.Node) else s for s in (*to, *of)]  # type: ignore[misc]
    return val(x).dim() > 0 and all(known(s * len(to) == val(x).shape[0]) for s in sizes)  # type: ignore[arg-type]


def kind_of(node: fx.Node) -> str:
    return str(node.target._opname)  # type: ignore[union-attr]


def group_of(node: fx.Node) -> str | None:
    group = arguments_of(node).get("group_name")
    return group if isinstance(group, str) else None


def point_to_point(node: fx.Node) -> list[str]:
    """The sends and receives that a functional collective is, in their order; none if it is for the whole group."""
    kind = kind_of(node)
    return list(node.args[0]) if kind == "batch_p2p_ops" else [kind] * (kind in ("isend", "irecv"))  # type: ignore[arg-type]


def collectives(graph: fx.Graph) -> Iterator[fx.Node]:
    """Every node that communicates by a functional collective."""
    return (n for n in graph.nodes if communicates(n) and n.target.namespace != "weft")


# Ops of the pass that stand for no code: one ties what is called, the other holds the report.
_NOTES = ("keep_order", "record")


def communicates(node: fx.Node) -> bool:
    """Whether the node starts a collective: a functional one, or one of weft's ops."""
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    if node.target.namespace == "weft":
        return node.target not in (*_COPIED_WAITS, schema.all_gather_release) and kind_of(node) not in _NOTES
    namespaced = node.target.namespace in ("_c10d_functional", "_c10d_functional_autograd")
    return namespaced and node.target._opname not in (*_WAITS, "_wrap_tensor_autograd")


def waits(node: fx.Node) -> bool:
    """Whether the node waits for a collective, or for several at once."""
    return fills_what_it_waits_for(node) or node.target in _COPIED_WAITS


def fills_what_it_waits_for(node: fx.Node) -> bool:
    """Whether it is a wait of torch's, which returns what the collective has made."""
    return getattr(node.target, "namespace", "") == "_c10d_functional" and kind_of(node) in _WAITS


def starts(node: fx.Node) -> bool:
    """Whether the node starts a collective that runs beside what follows it: any but those of weft's kernels."""
    return communicates(node) and (node.target.namespace != "weft" or is_copied(node))  # type: ignore[union-attr]


def is_copied(node: fx.Node) -> bool:
    """Whether the node starts a collective that copy engines carry out."""
    return node.target in _COPIED


def is_placed(node: fx.Node) -> bool:
    """Whether what the node has waited for stays on the heap, where it came to."""
    return node.target is schema.all_gather_wait and bool(node.kwargs.get("placed"))
