"""What is computed of a gathered tensor row by row: the same of each shard, gathered.

So it is with views, with whatever takes each element alone, and with the maximum of a row or of a part of one. A number
that is the same on all ranks may take part; a maximum over the rows of several ranks may not, as each rank would have
that of its own rows. A sum is none, either: in another shape it may be rounded otherwise.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

from torch import fx

from ...library import schema
from ..graph.collectives import Collective, communicates, group_of, waits
from ..graph.index_map import RANK, Dims, gathered_dims, numel, same_size
from ..graph.nodes import LeftAlone, argument, aten, c10d, calls, is_val, val, walk, what
from ..graph.rewrite import call, rearrange, repeated, reshape
from ..graph.row_wise import is_pointwise, reduced_dims
from ..graph.sizes import known, same_shape
from ..graph.split_cat import SPLITS
from ..graph.views import PERMUTES, steps_back, view_step
from .scaled_mm import SCALED_MMS, ScaledMm, scaled_mm

_FAR = 128  # nodes between a gather and its products
_NEAR = 12  # steps from a scale to the gather that it comes from
_DEEP = 32  # nodes that a number is computed by
_MAXIMA = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_CONSTANTS = (aten.full.default, aten.scalar_tensor.default, aten.lift_fresh_copy.default)
_PARTS = (aten.select.int, aten.slice.Tensor, operator.getitem, *SPLITS)


class RowByRow:
    """Of one gather, and of those that gather scales to go with it.

    Attributes:
        products: the scaled products that depend on it.
        bases: it, and others that are found on the way, by what waits for them.
    """

    def __init__(self, c: Collective) -> None:
        self._c = c
        self.bases = {c.wait: c}
        self._reached, self._cut_off = _reached([c.wait])
        self._dims: dict[fx.Node, Dims | None] = {}
        self._shards: dict[fx.Node, fx.Node] = {}
        found = map(scaled_mm, sorted(n for n in self._reached if calls(n, *SCALED_MMS)))
        self.products: list[ScaledMm] = [each for each in found if each is not None]

    def dims(self, node: fx.Node) -> Dims | None:
        """Where the node has the rows of which rank; None where it does not depend on the gathered tensor. LeftAlone:
        it is not computed row by row."""
        if node not in self._dims:
            self._dims[node] = self._find(node)
        return self._dims[node]

    def _find(self, node: fx.Node) -> Dims | None:
        if (base := self.bases.get(node)) is not None:
            return gathered_dims(val(base.x).shape, base.world)
        if node not in self._reached:
            if not self._takes_along(node):
                return None
            return self._find(node)
        if self._cut_off:
            raise LeftAlone(f"more than {_FAR} nodes take what is gathered before its scaled products do")
        if (step := view_step(node)) is not None:
            made_of = (*step.between, step.source)
            if all(n in made_of or not is_val(n) for n in node.all_input_nodes):
                return step.forward(self._needed(step.source))
        if calls(node, *_MAXIMA):
            return self._maximum(node)
        if is_pointwise(node):
            return self._pointwise(node)
        raise LeftAlone(f"{what(node)} is not computed row by row")

    def _needed(self, node: fx.Node) -> Dims:
        dims = self.dims(node)
        assert dims is not None
        return dims

    def _takes_along(self, node: fx.Node) -> bool:
        """Whether the node is made of what another gather of the group has gathered, which is then part of this."""
        for _ in range(_NEAR):
            if node.op != "call_function" or communicates(node) or waits(node):
                break
            inputs = [n for n in node.all_input_nodes if n.op == "call_function"]
            if (source := _step_source(node)) is None and (not is_pointwise(node) or len(inputs) != 1):
                return False
            node = source or inputs[0]
        gather: Any = node.args[0] if calls(node, c10d.wait_tensor.default) else None
        if not calls(gather, c10d.all_gather_into_tensor.default):
            return False
        try:
            c = Collective.from_node(gather, frozenset((self._c.group,)))
        except LeftAlone:
            return False
        if val(c.x).dim() == 0:
            return False
        self.bases[node] = c
        more, cut_off = _reached([node])
        self._reached |= more
        self._cut_off |= cut_off
        return True

    def _maximum(self, node: fx.Node) -> Dims:
        dims = self._needed(node.args[0])  # type: ignore[arg-type]
        over = {*(reduced_dims(node) or range(len(dims)))}
        keep = bool(argument(node, 2, "keepdim", False))
        if any(digit.axis == RANK for d in over for digit in dims[d]):
            raise LeftAlone(
                f"{what(node)} is the maximum over the rows of all ranks, of which each rank has its own before they "
                "are gathered, and no all_reduce takes it"
            )
        return tuple(() if i in over else d for i, d in enumerate(dims) if keep or i not in over)

    def _pointwise(self, node: fx.Node) -> Dims:
        shape = val(node).shape
        result: list[Any] = [()] * len(shape)
        for operand in node.all_input_nodes:
            dims = self.dims(operand)
            if dims is None:
                self._check_number(operand, node)
                continue
            for i, digits in enumerate(dims, start=len(shape) - len(dims)):
                if result[i] and digits and not same_size(result[i], digits):
                    raise LeftAlone(f"{what(node)} takes rows in different orders")
                result[i] = result[i] or digits
        if not same_shape([numel(digits) for digits in result], shape):
            raise LeftAlone(f"{what(node)} takes what has other rows than the gathered tensor")
        return tuple(result)

    def _check_number(self, operand: fx.Node, user: fx.Node) -> None:
        if not is_val(operand) or not known(val(operand).numel() == 1):
            raise LeftAlone(f"{what(user)} takes {what(operand)}, which each rank may have otherwise")
        if (source := _rank_dependent(operand, self._c.group)) is not None:
            raise LeftAlone(
                f"{what(user)} takes {what(operand)}, which comes of {what(source)} on this rank and of no maximum "
                "over the ranks: others may have another"
            )

    def nodes(self, roots: Iterable[fx.Node]) -> set[fx.Node]:
        """All that the roots are computed by, down to what is gathered."""

        def of_rows(nodes: Iterable[fx.Node]) -> list[fx.Node]:
            return [n for n in nodes if self._dims.get(n) is not None]

        def made_of(node: fx.Node) -> list[fx.Node]:
            step = None if node in self.bases else view_step(node)
            if step is not None and step.between:
                return [*step.between, step.source]
            return [] if node in self.bases else of_rows(node.all_input_nodes)

        return {*walk(of_rows(roots), made_of)}

    def given(self, roots: Iterable[fx.Node]) -> list[fx.Node]:
        """The numbers that take part in it."""
        nodes = self.nodes(roots)
        return [
            n
            for node in nodes
            if node not in self.bases
            for n in node.all_input_nodes
            if n not in nodes and n in self._dims
        ]

    def shard(self, node: fx.Node, at: fx.Node) -> fx.Node:
        """The same of this rank's shard, before ``at``. LeftAlone: a size is not there where it is needed."""
        if (done := self._shards.get(node)) is None:
            done = self._shards[node] = self._of_shard(node, at)
        return done

    def _of_shard(self, node: fx.Node, at: fx.Node) -> fx.Node:
        if (base := self.bases.get(node)) is not None:
            return base.x
        if self.dims(node) is None:
            return node
        step = view_step(node)
        if step is None or step.change is not None:
            return repeated(node, lambda n: self.shard(n, at), at)
        source = self.shard(step.source, at)
        have, want = (of_shard(self._needed(n)) for n in (step.source, node))
        shape = [numel(digits) for digits in want]
        if not step.between and len(want) == len(have) and calls(node, *PERMUTES):
            return call(at, node.target, source, *node.args[1:])
        if not step.between:
            return reshape(source, shape, at, [self._c.x])
        return rearrange(source, have, want, shape, at, [self._c.x])


def of_shard(dims: Dims) -> Dims:
    """The dimensions of one rank's shard."""
    return tuple(tuple(digit for digit in digits if digit.axis != RANK) for digits in dims)


def _step_source(node: fx.Node) -> fx.Node | None:
    step = next(steps_back(node), None)
    return None if step is None else step.source


def _reached(sources: list[fx.Node]) -> tuple[set[fx.Node], bool]:
    """What depends on the sources, up to scaled products and collectives; whether that is more than _FAR nodes."""
    found, pending = set[fx.Node](), list(sources)
    while pending:
        node = pending.pop()
        for user in node.users:
            if user in found or user.op == "output" or communicates(user) or waits(user):
                continue
            if len(found) == _FAR:
                return found, True
            found.add(user)
            if not calls(user, *SCALED_MMS):
                pending.append(user)
    return found, False


def _rank_dependent(number: fx.Node, group: str) -> fx.Node | None:
    """What a number of one element comes of that each rank may have otherwise, unless that is an input of the graph of
    its own size: such a number is taken to be the same on all ranks. None if it comes of nothing else."""
    pending, seen = [number], set[fx.Node]()
    while pending:
        node = pending.pop()
        if node in seen or node.op in ("placeholder", "get_attr"):
            continue
        seen.add(node)
        if len(seen) > _DEEP:
            return node
        if calls(node, c10d.wait_tensor.default, schema.all_reduce):
            reduced: Any = node.args[0] if waits(node) else node
            taken = calls(reduced, c10d.all_reduce.default, schema.all_reduce) and group_of(reduced) == group
            if not taken or reduced.args[1] not in ("max", "min"):
                return node
            continue
        if _is_part(node):
            pending += node.all_input_nodes
            continue
        for operand in node.all_input_nodes:
            if not is_val(operand) or not known(val(operand).numel() == 1):
                return operand
            pending.append(operand)
        if communicates(node) or not (node.all_input_nodes or calls(node, *_CONSTANTS)):
            return node
    return None


def _is_part(node: fx.Node) -> bool:
    """Whether the node is a part of an input of one dimension: one of a module's scales that lie in one tensor."""
    while node.op == "call_function":
        source = node.args[0]
        if not isinstance(source, fx.Node) or not (calls(node, *_PARTS) or _step_source(node) is source):
            return False
        node = source
    return node.op == "placeholder" and is_val(node) and val(node).dim() == 1
