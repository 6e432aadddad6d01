"""What makes fp8 of a norm: by a scale that is given, or by one of each row, as vLLM and torchao spell it.

Known are the three functions of ``fused_all_reduce_rms_norm_quant``, with maxima by ``amax`` or ``max``, of the rows or
of any view that keeps them. Nothing else may need the norm: the op does not store it.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ....kernels.device.gemm.scaling import FP8
from ..graph.collectives import communicates, waits
from ..graph.effects import first_write, writes
from ..graph.nodes import FLAT, LeftAlone, aten, calls, check_users, is_val, some, val, walk, what
from ..graph.rewrite import reshape
from ..graph.row_wise import is_pointwise, reduced_dims
from ..graph.sizes import is_contiguous, known, same_shape
from ..graph.views import CASTS, has_same_columns, unchanged
from .norm import FoundNorm

_NEAR = 24  # nodes from the norm to a cast to fp8
_MAXIMA = (aten.amax.default, aten.max.dim)
_READ = 8  # nodes after the sum that a given scale is computed by


@dataclass
class FollowingQuant:
    """``numbers`` are the norm in fp8, by ``scale``, which is ``given`` or made of each row.

    ``nodes`` are the steps; ``late``: what a given scale is computed by, and can be before the norm.
    """

    numbers: fx.Node
    scale: fx.Node
    given: bool
    scale_op: str
    smallest: float | None
    nodes: list[fx.Node]
    late: list[fx.Node] = field(default_factory=list)

    @property
    def detail(self) -> str:
        dtype = str(val(self.numbers).dtype).removeprefix("torch.")
        return f"in {dtype} by {'a given scale' if self.given else 'a scale of each row'}"

    @property
    def arguments(self) -> dict[str, Any]:
        """The op's, besides those of the norm."""
        named: dict[str, Any] = {"out_dtype": val(self.numbers).dtype, "scale_op": self.scale_op}
        return named | ({"scale": self.scale} if self.given else {"smallest": self.smallest})

    def replaced(self, results: list[fx.Node], at: fx.Node) -> dict[fx.Node, fx.Node]:
        """What takes the place of which node, of the op's numbers, and scales if none is given."""
        old = (self.numbers,) if self.given else (self.numbers, self.scale)
        return {n: reshape(r, val(n).shape, at) for n, r in zip(old, results, strict=True)}

    @classmethod
    def after(cls, norm: FoundNorm, at: fx.Node) -> FollowingQuant | None:
        """What makes fp8 of a norm whose op stands before ``at``, the sum; None if nothing does. LeftAlone: something
        does, and it is not what the op computes."""
        if not (casts := _casts_to_fp8(norm.normed)):
            return None
        if norm.layer:
            raise LeftAlone("no op makes fp8 of a LayerNorm")
        if len(casts) > 1:
            raise LeftAlone(f"it is cast to fp8 by {some(casts)}")
        # The norm, and views of it that have the same rows.
        rows = walk([norm.normed], lambda n: (u for u in n.users if calls(u, *FLAT) and has_same_columns(u)))
        found = _Steps(norm.normed, {*rows}, casts[0]).found()
        if found.given:
            found.late = _late(found.scale, at)
        found.check(norm.normed, at)
        return found

    def check(self, normed: fx.Node, at: fx.Node) -> None:
        """LeftAlone: more is needed than the op gives, or at another place."""
        results = (self.numbers, self.scale)
        for node in (normed, *self.nodes):
            if node not in results:
                check_users(node, (*self.nodes, *results))
        if moved := [n for n in self.nodes if is_val(n) and val(n).device != val(normed).device]:
            raise LeftAlone(f"{some(moved)} lies on {val(moved[0]).device}")
        if not all(is_contiguous(val(n)) for n in (results[:1] if self.given else results)):
            raise LeftAlone("it has strides of its own")
        if (write := first_write(at, self.numbers)) is not None:
            raise LeftAlone(f"{what(write)} writes to memory before it")


@cache
def _saturates(dtype: torch.dtype) -> bool:
    """Whether a cast bounds what is too large, as to e4m3 from torch 2.13 on, where only NaN stays NaN."""
    with unset_fake_temporarily():
        cast = torch.tensor([torch.inf, -torch.inf]).to(dtype).to(torch.float32)
    return cast.tolist() == [torch.finfo(dtype).max, torch.finfo(dtype).min]


def _casts_to_fp8(normed: fx.Node) -> list[fx.Node]:
    """Those near the norm, with only views, maxima and elementwise ops between."""
    found, casts, pending = {normed}, list[fx.Node](), [normed]
    while pending and len(found) < _NEAR:
        for user in pending.pop(0).users:
            if user in found or user.op != "call_function" or communicates(user) or writes(user):
                continue
            if calls(user, *CASTS) and val(user).dtype in FP8:
                casts.append(user)
            elif calls(user, *FLAT, *CASTS, *_MAXIMA, operator.getitem) or is_pointwise(user):
                pending.append(user)
            found.add(user)
    return casts


@dataclass
class _Steps:
    """The steps from a norm, some of whose views ``rows`` are, to a cast to fp8, from there to here."""

    normed: fx.Node
    rows: set[fx.Node]
    cast: fx.Node

    @property
    def dtype(self) -> torch.dtype:
        return val(self.normed).dtype

    @property
    def largest(self) -> float:
        return torch.finfo(val(self.cast).dtype).max

    def found(self) -> FollowingQuant:
        scaled = self._saturated(self.cast.args[0])
        wide, factor = self._operands(scaled)
        scale_op = "divide" if calls(scaled, aten.div.Tensor) else "multiply"
        scale = self._flat(factor)
        if scale_op == "multiply" and calls(scale, aten.reciprocal.default):
            scale_op, scale = "reciprocal", scale.args[0]  # type: ignore[assignment]
        for node in (wide, factor, scale):
            if not is_val(node) or val(node).dtype != torch.float32:
                raise LeftAlone(f"{what(scaled)} is not by a scale in float32")
        if not same_shape(val(scaled).shape, val(wide).shape):
            raise LeftAlone(f"{what(scaled)} has another shape than the norm")
        after = {*walk([self.normed], lambda n: (u for u in n.users if u < self.cast))}
        if self._flat(scale) not in after:
            if not known(val(scale).numel() == 1) or val(scale).device != val(wide).device:
                raise LeftAlone(f"{what(scale)} is no scale of one element on {val(wide).device}")
            return FollowingQuant(self.cast, scale, True, scale_op, None, self._inner(after))
        if not same_shape(val(factor).shape, (*val(wide).shape[:-1], 1)):
            raise LeftAlone(f"{what(factor)} is no scale of each row")
        scale = self._flat(scale)
        smallest = _SCALES[scale_op](self, scale)
        return FollowingQuant(self.cast, scale, False, scale_op, smallest, self._inner(after, scale))

    def _saturated(self, node: Any) -> fx.Node:
        """What is brought between the largest numbers."""
        bounds: dict[Any, Any] = {}
        given = node
        while calls(node, *_BOUNDS, aten.clamp.default):
            both = calls(node, aten.clamp.default)
            bounds |= dict(zip(_BOUNDS if both else (node.target,), node.args[1:], strict=False))
            node = node.args[0]
        if not calls(node, aten.mul.Tensor, aten.div.Tensor) or not is_val(node):
            raise LeftAlone(f"{what(node)} does not apply a scale")
        expected = dict(zip(_BOUNDS, (-self.largest, self.largest), strict=True))
        saturates = _saturates(val(self.cast).dtype)
        if bounds != expected and not (saturates and bounds.items() <= expected.items()):
            raise LeftAlone(f"{what(given)} does not bring it between {-self.largest:g} and {self.largest:g}")
        return node

    def _operands(self, scaled: fx.Node) -> tuple[fx.Node, fx.Node]:
        """The norm in float32, and what it is multiplied with or divided by."""
        a, b = scaled.args[:2]
        if self._is_wide(a):
            return a, b  # type: ignore[return-value]
        if calls(scaled, aten.mul.Tensor) and self._is_wide(b):
            return b, a  # type: ignore[return-value]
        raise LeftAlone(f"{what(scaled)} is not of the norm in float32")

    def _is_wide(self, node: Any) -> bool:
        """Whether it is the norm, cast to float32 if it is something else."""
        if not is_val(node) or val(node).dtype != torch.float32:
            return False
        while node not in self.rows and (node.target in FLAT or calls(node, *CASTS)):
            same = known(val(node).shape[-1] == val(self.normed).shape[-1]) if val(node).dim() else False
            if not same or not is_val(node.args[0]) or val(node).dtype not in (self.dtype, torch.float32):
                return False
            node = node.args[0]
        return node in self.rows

    def _flat(self, node: Any) -> fx.Node:
        """What a node is a view of."""
        while isinstance(node, fx.Node):
            flat = node.target in FLAT and is_val(node.args[0])
            source = node.args[0] if flat else unchanged(node)
            if source is None:
                break
            node = source
        return node  # type: ignore[no-any-return]

    def _inner(self, after: set[fx.Node], scale: fx.Node | None = None) -> list[fx.Node]:
        """Those after the norm that lead to the cast, but not by way of the scale alone, which the op gives."""
        within = after - {self.normed, scale}
        ends = [self.cast, *([] if scale is None else [scale])]
        found = walk(ends, lambda n: (a for a in n.all_input_nodes if a in within))
        derived = set[fx.Node]()
        for node in sorted(found):
            inputs = [n for n in node.all_input_nodes if n in after]
            if node is not self.cast and node is not scale and inputs:
                derived |= {node} if all(n is scale or n in derived for n in inputs) else set()
        return [n for n in found if n not in derived]

    # What each kind of scale is made of: what bounds it.

    def _reciprocal(self, scale: fx.Node) -> float:
        bounded, smallest = self._at_least(scale)
        amax = self._over_largest(bounded)
        self._check_amax(self._uncast(amax))
        return smallest

    def _uncast(self, node: fx.Node) -> fx.Node:
        """What is cast to float32."""
        return self._flat(node.args[0]) if calls(node, *CASTS) and val(node).dtype == torch.float32 else node

    def _divide(self, scale: fx.Node) -> float:
        node = scale
        if self.dtype != torch.float32:
            if not calls(scale, *CASTS) or val(self._flat(scale.args[0])).dtype != self.dtype:
                raise LeftAlone(f"{what(scale)} is not of the rows' dtype before it is divided by")
            node = self._flat(scale.args[0])
        bounded = self._over_largest(node)
        # Inductor writes a bound in 16 bits as one in float32 between two casts.
        rounded = calls(bounded, *CASTS) and val(bounded).dtype == self.dtype
        amax, smallest = self._at_least(self._flat(bounded.args[0]) if rounded else bounded)
        self._check_amax(self._uncast(amax))
        return smallest

    def _multiply(self, scale: fx.Node) -> float:
        product = self._flat(scale.args[0]) if calls(scale, *CASTS) else None
        if not calls(product, aten.mul.Tensor) or val(product).dtype != torch.float64:  # type: ignore[arg-type]
            raise LeftAlone(f"{what(scale)} is not made in float64")
        assert product is not None
        inverse, number = product.args[:2]
        if not calls(inverse, aten.reciprocal.default) or number != self.largest:
            raise LeftAlone(f"{what(product)} is not {self.largest:g} by a maximum")
        amax, smallest = self._at_least(self._flat(inverse.args[0]))  # type: ignore[union-attr]
        if not calls(amax, *CASTS) or val(amax).dtype != torch.float64:
            raise LeftAlone(f"{what(amax)} is another step than a scale has there")
        self._check_amax(self._flat(amax.args[0]))
        return smallest

    def _at_least(self, node: fx.Node) -> tuple[fx.Node, float]:
        """What is bounded from below, and by what; by 0 if it is not."""
        below = calls(node, aten.clamp.default) and len(node.args) == 2
        if not below and not calls(node, aten.clamp_min.default):
            return node, 0.0
        source, bound = node.args
        if not isinstance(bound, int | float) or not 0 <= bound <= torch.finfo(torch.float32).max:
            raise LeftAlone(f"{what(node)} bounds a scale by {bound}")
        return self._flat(source), float(bound)

    def _over_largest(self, node: fx.Node) -> fx.Node:
        if not calls(node, aten.div.Tensor) or node.args[1] != self.largest or node.kwargs:
            raise LeftAlone(f"{what(node)} does not divide a maximum by {self.largest:g}")
        return self._flat(node.args[0])

    def _check_amax(self, node: fx.Node) -> None:
        """It is the largest absolute value of each row."""
        reduced: Any = node
        if calls(node, operator.getitem):
            reduced = node.args[0]
            if node.args[1] != 0 or len(reduced.users) != 1:
                raise LeftAlone(f"{what(reduced)} is needed for more than its maxima")
        if not calls(reduced, *_MAXIMA):
            raise LeftAlone(f"{what(reduced)} is no maximum of each row")
        sizes, x = self._flat(reduced.args[0]), val(reduced.args[0])
        of_rows = calls(sizes, aten.abs.default) and sizes.args[0]
        if of_rows not in self.rows and not self._is_wide(of_rows):
            raise LeftAlone(f"{what(reduced)} is not of the norm's absolute values")
        # Along whole rows, whether it keeps their dimension or not.
        along = reduced_dims(reduced) == [x.dim() - 1]
        if not along or not known(x.shape[-1] == val(self.normed).shape[-1]):
            raise LeftAlone(f"{what(reduced)} is no maximum of each row")


_BOUNDS = (aten.clamp_min.default, aten.clamp_max.default)
# What bounds a scale of each row, if it is made as an op's is.
_SCALES = {"reciprocal": _Steps._reciprocal, "divide": _Steps._divide, "multiply": _Steps._multiply}


def _late(scale: fx.Node, at: fx.Node) -> list[fx.Node]:
    """What a given scale is computed by after ``at``, in the graph's order, which can be done before it. LeftAlone: it
    cannot be."""
    found, pending = list[fx.Node](), [scale]
    while pending:
        node = pending.pop()
        if node in found or node < at:
            continue
        alone = node.op == "call_function" and not (communicates(node) or waits(node) or writes(node))
        if node is at or len(found) == _READ or not alone:
            raise LeftAlone(f"{what(scale)}, its scale, is computed after the sum")
        found.append(node)
        pending += node.all_input_nodes
    return sorted(found)
