"""What ranks must have alike to run a graph fused: what became of its collectives, what the ops get, and what travels.

A plain collective sends elements in the order in which they lie, whatever their shape is; a fused op sends them in the
order that its rank's product asks for. So ranks that do right by themselves may differ in shapes and order, and such
ranks cannot run fused.

A number that a graph multiplies by may be moved from one side of a collective to the other, and so from what each rank
does to all that it receives to what it does to its own part. That is the same function only where all ranks have the
same number. So what is computed by nodes that the pass has put in is compared, too; and so is what it takes to be the
same on all ranks. What a graph of forward and backward took to be the same stays apart (``NUMBERS``): it is changed by
then, whatever the ranks find.

Sizes stand apart from the rest. Symbolic ones are filled in whenever the graph runs, so that a graph for one size and
a graph for any may agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import fx
from torch._inductor import config
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from ...dispatch.call_check import dims_of_element, own_dims_on
from ...ops import OP_OF, Op
from ..graph.collectives import collectives, communicates, group_of, kind_of, point_to_point
from ..graph.index_map import Dims, strides
from ..graph.nodes import arguments_of, walk
from ..graph.row_wise import is_pointwise
from ..graph.sizes import Size
from ..records.entry import Entry

#: What a node has in its ``meta`` if ranks must compute it alike: the groups whose ranks.
COMPARED = "weft_compared"
#: What each collective of such a group has, in the graphs that are made of a graph of forward and backward: 31 bits of
#: what that takes and returns, and 32 of what the ranks must compute alike in it.
NUMBERS = "weft_numbers"
_OWN = ("device", "size", "shape", "length")  # a rank's: its values do not depend on them
_REDUCTIONS = ("amax", "amin", "max", "min")
Order = tuple[Dims, tuple[Size, ...]]  # what travels, as digits of a tensor of this shape


class Signature:
    """
    Attributes:
        what: what became of each collective, in words that are the same on every rank.
        sizes: those of the ops' tensors; None where it is the next of ``symbolic``.
        recorded: whether Inductor records the graph in CUDA graphs.
    """

    def __init__(
        self,
        graph: fx.Graph,
        index: dict[str, int],
        fused: Collection[str | None],
        entries: Iterable[Entry],
        orders: Iterable[Order],
        *,
        before: Collection[fx.Node],
    ) -> None:
        """``graph``: as the pass leaves it; ``before``: the nodes that it had before.

        Args:
            index: the groups' numbers; their names may differ from rank to rank.
            fused: the groups in which something was fused.
            orders: of each op that the pass has put in.
        """
        self._index = index
        self.recorded: bool = config.triton.cudagraphs  # such calls meet in workspaces of their own
        self.what = [self._became(e) for e in entries]
        self.sizes: list[int | str | None] = []
        self.symbolic: list[torch.SymInt] = []
        lines = [*self.what]
        plain = set(collectives(graph))
        for node in graph.nodes:
            if node in plain and (point_to_point(node) or group_of(node) not in fused):
                # Ranks send to different peers, and what goes through another group is that one's affair: what counts
                # is which ops there are, and in which order.
                lines.append(f"{kind_of(node)} {self._word(group_of(node), False)} {point_to_point(node)}")
            elif node in plain or getattr(node.target, "namespace", "") == "weft":
                shapes = node not in plain  # of an all_to_all the ranks' may differ
                op = OP_OF.get(kind_of(node)) if shapes else None
                # All given by name, of which ranks may have values of their own, but for None.
                own = () if op is None else op.own_values
                words = [
                    f"{n}={a is not None if n in own else self._word(a, shapes, _own_dims(node, n, op))}"
                    for n, a in arguments_of(node).items()
                ]
                lines.append(f"{kind_of(node)} {' '.join(words)}")
        lines += [_computed(node) for node in graph.nodes if node not in before and _computes(node)]
        lines += [_computed(node) for node in graph.nodes if COMPARED in node.meta]
        lines += [self._order(*order) for order in orders]
        self._text = "\n".join(lines)

    @property
    def digest(self) -> int:
        """63 bits, of everything but the sizes."""
        return digest(self._text)

    @property
    def name(self) -> str:
        return name_of(self.digest)

    def _became(self, entry: Entry) -> str:
        where = f"{entry.collective} over group {self._index.get(entry.group or '', '?')}"
        became = f"fused into {entry.fused_into}, dim {entry.dim}" if entry.fused_into else "left alone"
        return f"{where} {became}{', in a CUDA graph' if self.recorded else ''}"

    def _word(self, value: Any, shapes: bool, own: tuple[int, ...] = ()) -> str:
        """``own``: dimensions in which each rank may have a size of its own, as ``Op.own_dims`` has them."""
        if isinstance(value, (list, tuple)):
            if not shapes:
                return f"[{len(value)}]"
            words = [self._word(v, True, dims_of_element(own, i)) for i, v in enumerate(value)]
            return f"[{' '.join(words)}]"
        if isinstance(value, str):
            return f"group {self._index[value]}" if value in self._index else value
        if isinstance(value, fx.Node):
            tensor = value.meta.get("val")
            if not isinstance(tensor, torch.Tensor):
                return "-"
            if not shapes:
                return f"{tensor.dtype} "
            left_out = {dim % tensor.dim() for dim in own if tensor.dim()}
            return f"{tensor.dtype} {self._put(s for i, s in enumerate(tensor.shape) if i not in left_out)}"
        return str(value) if isinstance(value, (bool, int, float)) else "-"

    def _order(self, dims: Dims, shape: tuple[Size, ...]) -> str:
        return " ".join(f"[{' '.join(map(self._put, digits))}]" for digits in strides(dims, shape))

    def _put(self, sizes: Iterable[Size]) -> str:
        count = len(self.sizes)
        for size in sizes:
            known = size if isinstance(size, int) else size.node.expr
            if isinstance(known, int) or known.is_number:
                self.sizes.append(int(known))
            elif free_unbacked_symbols(size):
                self.sizes.append(str(known))
            else:
                self.sizes.append(None)
                self.symbolic.append(size)
        return f"{len(self.sizes) - count}d"


def _own_dims(node: fx.Node, argument: str, op: Op | None) -> tuple[int, ...]:
    """Those in which ranks may have other sizes of what an op of weft takes."""
    first = next((n.meta.get("val") for n in node.all_input_nodes), None)
    if op is None or not isinstance(first, torch.Tensor):
        return ()
    if node.kwargs.get("counts") is not None and argument in op.own_by_counts:
        return (arguments_of(node)[op.own_by_counts[argument]],)
    return own_dims_on(first.device.type, op).get(argument, ())


def _computes(node: fx.Node) -> bool:
    name = getattr(node.target, "_opname", "clone")
    return name != "clone" and (is_pointwise(node) or name in _REDUCTIONS)


def _computed(node: fx.Node) -> str:
    """The operator and its numbers."""
    given: Any = node.args
    if isinstance(node.target, torch._ops.OpOverload):
        given = {name: value for name, value in arguments_of(node).items() if name not in _OWN}
    # Functions of sizes, such as torch.sym_max, have their addresses in their texts.
    name = (
        node.target
        if isinstance(node.target, torch._ops.OpOverload)
        else getattr(node.target, "__name__", "")
    )
    return f"{name} {'' if communicates(node) else fx.map_arg(given, lambda n: None)}"


def compare(nodes: Iterable[fx.Node], group: str, inside: Collection[fx.Node] = ()) -> None:
    """Has the ranks of a group compare how they compute the nodes, and what these are made of by calls: up to
    collectives, and without what is ``inside``."""

    def made_of(node: fx.Node) -> Iterator[fx.Node]:
        return (n for n in node.all_input_nodes if n not in inside and not communicates(n))

    for node in walk(nodes, made_of):
        if node.op == "call_function":
            node.meta[COMPARED] = {*node.meta.get(COMPARED, ()), group}


def note_numbers(joint: fx.Graph) -> None:
    """Has collectives say what was compared in the graph of forward and backward, each for its group."""
    computed: dict[str, list[str]] = {}
    for node in joint.nodes:
        for group in node.meta.pop(COMPARED, ()):
            computed.setdefault(group, []).append(_computed(node))
    ends = [*joint.find_nodes(op="placeholder"), *torch.utils._pytree.tree_leaves(joint.output_node().args)]
    values = [n.meta.get("val") if isinstance(n, fx.Node) else n for n in ends]
    kinds = [(v.dtype, v.dim()) if isinstance(v, torch.Tensor) else type(v) for v in values]
    for node in joint.nodes:
        if communicates(node) and (lines := computed.get(group_of(node) or "")):
            node.meta[NUMBERS] = digest(str(kinds)) >> 32 << 32 | digest("\n".join(lines)) >> 31


def name_of(signature: int) -> str:
    """By which the report has a graph."""
    return f"{signature:016x}"


def digest(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1
