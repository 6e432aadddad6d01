"""Arguments of a small call of each op, by their names: the table of the tests that all ops go through."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from weft import fused_ops
from weft.fused_ops import MoeHandle, moe_combine, moe_dispatch

_WITHOUT_GRADIENT = "all_reduce_$|one_shot_gather|quant|scaled| max$| out$"


@dataclass(frozen=True)
class OpCall:
    """A function of weft and its arguments. A call takes others in place of ``tensors``."""

    function: Callable[..., Any]
    arguments: dict[str, Any]
    has_gradient: bool = True

    @property
    def tensors(self) -> list[Tensor]:
        """Those of floating point, in the order of the arguments."""
        flat = [
            x for value in self.arguments.values() for x in (value if isinstance(value, list) else [value])
        ]
        return [x for x in flat if _is_float(x)]

    def put(self, *tensors: Tensor) -> dict[str, Any]:
        """The arguments with these in place of ``tensors``."""
        given = iter(tensors)
        named = {}
        for name, value in self.arguments.items():
            several = isinstance(value, list)
            put = [next(given) if _is_float(x) else x for x in (value if several else [value])]
            named[name] = put if several else put[0]
        return named

    def __call__(self, *tensors: Tensor) -> Any:
        return self.function(**self.put(*tensors))

    def first(self, *tensors: Tensor) -> Tensor:
        """The first result, or the sum of several products."""
        results: Any = self(*tensors)
        if isinstance(results, tuple):
            results = next(x for x in results if x is not None)
        return sum(results) if isinstance(results, list) else results

    def of_torch(self, group_name: str) -> tuple[Any, dict[str, Any]] | None:
        """The op in ``torch.ops.weft`` and its arguments; None if the function makes others of its own."""
        into = "_out" if "out" in self.arguments else ""
        op = getattr(torch.ops.weft, f"{self.function.__name__}{into}", None)
        given = {"group_name": group_name, **self.arguments}
        del given["group"]
        optional = {} if op is None else {a.name: a.has_default_value() for a in op.default._schema.arguments}
        taken = given.keys() <= optional.keys() <= {*given, *filter(optional.get, optional)}
        return (op.default, given) if taken else None

    def with_each(self) -> Iterator[tuple[str, Callable[[Any], Any]]]:
        """Of each tensor, integers too: what errors call it, and the call with something else in its place."""
        for name, value in self.arguments.items():
            if isinstance(value, Tensor):
                yield name, lambda x, name=name: self.function(**{**self.arguments, name: x})
            elif isinstance(value, list) and isinstance(value[0], Tensor):
                for i in range(len(value)):
                    yield (
                        f"{name}[{i}]",
                        lambda x, i=i, name=name, value=value: self.function(
                            **{**self.arguments, name: [*value[:i], x, *value[i + 1 :]]}
                        ),
                    )
            elif isinstance(value, MoeHandle):
                for part in value._fields:
                    yield (
                        f"{name}.{part}",
                        lambda x, part=part, value=value: self.function(
                            **{**self.arguments, "handle": value._replace(**{part: x})}
                        ),
                    )


def _is_float(x: object) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()


def sent_to_experts_and_back(x: Tensor, topk_ids: Tensor, weights: Tensor, group: Any) -> Any:
    """To experts that change nothing."""
    rows, offs, handle = moe_dispatch(x, topk_ids, 6, group, align=2)
    return moe_combine(rows, handle, weights, group), offs, *handle


def op_calls(size: int = 2, group: Any = None, tokens: int = 6) -> dict[str, OpCall]:
    """Fresh operands, of ``size`` ranks: 1, 2 or 3. A name is that of the op, and what is particular to the call.

    ``tokens``: of each rank, a multiple of 6.
    """
    n, times, g = tokens, tokens // 6, group
    x, rows, weight, B = torch.randn(n, 8), torch.randn(n, 8), torch.randn(8), torch.randn(8, 5)
    into, normed, targets = torch.randn(n * size, 8), (x, rows, weight, 1e-5, g), torch.arange(n) % 5
    part = {"bias": torch.randn(5), "residual": torch.randn(n // size, 5)}
    slots, shares = _integers([[2, 0], [1, -1], [3, 3], [-1, 2], [5, 4], [0, 1]] * times), torch.rand(n, 2)
    ids = torch.tensor([[0, 1], [3, 2], [1, 3], [6, 0], [4, 5], [1, 0]] * times)
    even = torch.tensor([[0, 1], [2, 3], [4, 5], [5, 4], [3, 2], [1, 0]] * times)  # no row is left over
    experts, ends, shared = torch.randn(2, 8, 24), _integers([2 * times, n]), {"shared": rows}
    product = x, experts, ends, _integers([[2], [0], [-1], [3], [5], [1]] * times), shares[:, :1]
    more = {"bias": torch.randn(2, 24), "residual": torch.randn(n, 24), "shared": torch.randn(n, 24)}
    more_of_part = {**more, "residual": torch.randn(n // size, 24)}
    biases = [more["bias"], more["bias"] + 1]
    gathered = x, [experts, experts + 1], slots[:, 0].clamp(min=0), ends, 0, g
    loss, of_loss = (x, torch.randn(5, 8), targets, g), {"bias": torch.randn(5)}
    A8, B8 = torch.randn(n, 32).to(torch.float8_e4m3fn), torch.randn(48, 32).to(torch.float8_e4m3fn).t()
    one, another, bias = torch.rand(()) + 0.5, torch.rand(()) + 0.5, torch.randn(48).bfloat16()
    of_each = {"biases": [bias], "out_dtypes": [torch.bfloat16]}
    handle = MoeHandle(_integers([[-1, -1]] * n * size), _integers([-1] * n), _integers([0] * n * size))
    made: dict[str, tuple[Any, ...]] = {
        "fused_all_gather_matmul": (x, [B, B + 1], 0, g, {"return_A": False}),
        "fused_matmul_reduce_scatter": (x, B, "sum", 0, g, part),
        "fused_matmul_all_reduce": (x, B, "avg", g),
        "one_shot_all_reduce": (x, "sum", g),
        "one_shot_all_reduce max": (x, "max", g),
        "one_shot_all_reduce_": (x.clone(), "sum", g),
        "one_shot_all_gather": (x, -1, g),
        "one_shot_all_gather out": (x, 0, g, {"out": into}),
        "one_shot_reduce_scatter": (x, "avg", 0, g),
        "one_shot_reduce_scatter out": (x, "min", -2, g, {"out": into[: n // size].clone()}),
        "one_shot_all_to_all": (x, 0, -1, g),
        "one_shot_gather": (x, -1, 0, g),
        "fused_matmul_all_to_all": (x, torch.randn(8, 12), 0, g),
        "fused_matmul_all_gather": (x, B, g),
        "fused_all_to_all_matmul": (x, torch.randn(8 * size, 5), 0, g),
        "fused_all_reduce_rms_norm": normed,
        "fused_all_reduce_rms_norm_quant": normed,
        "fused_all_reduce_rms_norm_quant scale": (*normed, {"scale": one}),
        "fused_all_reduce_layer_norm": (x, rows, weight, torch.randn(8), 1e-5, g),
        "fused_moe_combine_all_reduce": (x, slots, shares, g, shared),
        "fused_moe_combine_reduce_scatter": (x, slots, shares, 0, g, shared),
        "fused_moe_combine_all_reduce_rms_norm": (x, slots, shares, rows, weight, 1e-5, g, shared),
        "fused_grouped_matmul_all_reduce": (*product, "sum", g, more),
        "fused_grouped_matmul_reduce_scatter": (*product, "avg", 0, g, more_of_part),
        "fused_all_gather_grouped_matmul": (*gathered, {"return_A": False, "biases": biases}),
        "fused_linear_cross_entropy": (*loss, {**of_loss, "reduction": "none"}),
        "fused_linear_log_probs": (*loss, of_loss),
        "cross_entropy_of_sharded_logits": (torch.randn(n, 5), targets, g, {"reduction": "none"}),
        "fused_all_gather_scaled_matmul": (A8, [B8], one, [another], 0, g, of_each),
        "fused_scaled_matmul_reduce_scatter": (A8, B8, one, another, "sum", 0, g, {"bias": bias}),
        "moe_dispatch": (x, even, 6, g, {"capacity": 2 * n}),
        "moe_combine": (x, handle, shares, g),
        "sent_to_experts_and_back": (x, ids, shares, g),
    }
    return {name: _call(name, *of) for name, of in made.items()}


def _call(name: str, *given: Any) -> OpCall:
    """``given``: its arguments, those by name in a dictionary at the end."""
    named = given[-1] if isinstance(given[-1], dict) else {}
    function = getattr(fused_ops, name.split()[0], sent_to_experts_and_back)
    bound = signature(function).bind(*(x for x in given if x is not named), **named)
    return OpCall(function, bound.arguments, not re.search(_WITHOUT_GRADIENT, name))


def _integers(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)
