"""What the tests of the pass share: graphs as Inductor makes them, and a machine that runs them for all ranks at once.

A graph is captured under the fake process group: functionalised, split into forward and backward, and taken through
Inductor's own post-grad passes, without generating code.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map
from torch_versions import runs_uncompiled
from weft.fused_ops.passes import Entry, FusionPass

c10d = torch.ops._c10d_functional
AG, RS, AR = "weft::fused_all_gather_matmul", "weft::fused_matmul_reduce_scatter", "weft::one_shot_all_reduce"


class Cases(dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...], list[str | None]]]):
    """Programs by name, with the shapes of their inputs and into what their collectives are fused, in order."""

    def case(self, into: list[str | None], *shapes: tuple[int, ...]) -> Callable[[Any], Any]:
        """Enters the function that it decorates."""

        def enter(fn: Callable[..., Any]) -> Callable[..., Any]:
            self[fn.__name__] = (fn, shapes, into)
            return fn

        return enter


@contextlib.contextmanager
def fake_ranks(world: int) -> Iterator[str]:
    """A process group of ``world`` ranks that does not communicate; gives its name."""
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield dist.distributed_c10d._get_default_group().group_name
    finally:
        dist.destroy_process_group()


def gather(x: Tensor, dim: int = 0) -> Tensor:
    """torch's own spelling, differentiable in each of its versions."""
    return funcol.all_gather_tensor_autograd(x, dim, dist.distributed_c10d._get_default_group())


def scatter(x: Tensor, dim: int = 0, reduce_op: str = "sum") -> Tensor:
    group = dist.distributed_c10d._get_default_group()
    if reduce_op == "sum":
        return funcol.reduce_scatter_tensor_autograd(x, reduce_op, dim, group)
    return funcol.reduce_scatter_tensor(x, reduce_op, dim, group)


class Reduced(torch.autograd.Function):
    """An all-reduce forward, nothing backward: after a row-parallel layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_reduce(x, "sum", dist.distributed_c10d._get_default_group())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Copied(torch.autograd.Function):
    """The other way round: before column-parallel layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return Reduced.forward(ctx, grad)


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


@dataclass
class Seen:
    """A graph before and after the pass, and what the pass said."""

    before: fx.Graph
    after: fx.Graph
    entries: tuple[Entry, ...]

    @property
    def fused(self) -> list[str | None]:
        return [e.fused_into for e in self.entries]

    @property
    def reasons(self) -> str:
        return "\n".join(e.reason for e in self.entries)

    def count(self, op: str) -> int:
        return count(self.after, op)


def count(graph: fx.Graph, op: str) -> int:
    """How often the graph calls the op of this qualified name."""
    return sum(
        isinstance(n.target, torch._ops.OpOverload) and n.target._schema.name == op for n in graph.nodes
    )


def applied(graph: fx.Graph, fusion: FusionPass | None = None) -> Seen:
    """The pass, applied to a copy of the graph; by default for what goes with a product alone."""
    fusion = fusion or FusionPass(agree=False, collectives=False)
    known = len(fusion.report().entries)
    after = copied(graph)
    with inductor_config.patch(fx_graph_cache=False):  # for which a graph holds its record
        fusion(after)
    after.lint()
    return Seen(copied(graph), after, fusion.report().entries[known:])


def by_inductors_passes(made: Callable[[fx.GraphModule], Any]) -> Callable[[fx.GraphModule, list[Any]], Any]:
    """A backend: Inductor's passes over the graphs, and the options' own; then they run as ``made`` has them."""

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Any:
        with V.set_fake_mode(torch._guards.detect_fake_mode(example_inputs)):
            view_to_reshape(gm)
            post_grad_passes(gm, bool(kwargs.get("is_inference")))
        return made(gm)

    return lambda gm, example_inputs: compile_fx(gm, example_inputs, inner_compile=inner_compile)


def captured(
    fn: Callable[..., Any],
    *inputs: Tensor,
    fusion: FusionPass | None = None,
    dynamic: bool = False,
    runs: bool = True,
) -> list[Seen]:
    """The graphs of a function of tensors: one, or forward and backward where an input requires a gradient.

    Args:
        runs: the CPU has kernels for it; else results are made up.
    """
    seen: list[Seen] = []

    def record(graph: fx.Graph) -> None:
        seen.append(applied(graph, fusion))

    def made(gm: fx.GraphModule) -> Any:
        if runs and runs_uncompiled(gm.graph):
            return gm.forward
        (results,) = gm.graph.output_node().args
        return lambda *args: [made_up(r) if isinstance(r, fx.Node) else r for r in results]

    torch._dynamo.reset()
    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(post_grad_custom_post_pass=record, fx_graph_cache=False),
    ):
        torch.compile(fn, backend=by_inductors_passes(made), dynamic=None if dynamic else False)(*inputs)
    return seen


@cache
def rounds_between_casts() -> bool:
    """Whether what is cast to 16 bits and back is rounded: Inductor took both casts away before torch 2.13."""
    (seen,) = captured(lambda x: x.bfloat16().float(), torch.randn(3))
    return any(n.meta["val"].dtype == torch.bfloat16 for n in seen.before.nodes if n.op == "call_function")


def hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def like(value: Any) -> Any:
    """Something random of a placeholder's shape and strides, in float64."""
    if not isinstance(value, Tensor):
        return hint(value) if isinstance(value, (int, torch.SymInt)) else None
    shape, strides = [hint(s) for s in value.shape], [hint(s) for s in value.stride()]
    return torch.empty_strided(shape, strides, dtype=torch.float64).copy_(
        torch.randn(shape, dtype=torch.float64)
    )


def made_up(result: fx.Node) -> Any:
    """Something random for the result of a graph that is not run."""
    val = result.meta["val"]
    return like(val).to(val.dtype) if isinstance(val, Tensor) else like(val)


class Ranks:
    """Runs a graph for all ranks in step: a node's value is one value a rank."""

    def __init__(self, world: int) -> None:
        self.world = world

    def inputs(self, graph: fx.Graph) -> list[list[Any]]:
        """Random inputs of each rank, different on each."""
        vals = [n.meta.get("val") for n in graph.nodes if n.op == "placeholder"]
        return [[like(v) for v in vals] for _ in range(self.world)]

    def run(self, graph: fx.Graph, inputs: list[list[Any]]) -> list[list[Any]]:
        """What the graph returns, flat, for each rank; the inputs as it leaves them in ``left``."""
        envs: list[dict[fx.Node, Any]] = [{} for _ in range(self.world)]
        placeholders = [n for n in graph.nodes if n.op == "placeholder"]
        for env, values in zip(envs, inputs, strict=True):
            # A graph may write to its inputs.
            own = [v.clone() if isinstance(v, Tensor) else v for v in values]
            env.update(zip(placeholders, own, strict=True))
        self.left = [[env[p] for p in placeholders] for env in envs]
        for node in graph.nodes:
            if node.op == "call_function":
                args = [fx.map_arg((node.args, node.kwargs), env.__getitem__) for env in envs]
                for env, result in zip(envs, self.call(node.target, args), strict=True):
                    check_meta(node, result)
                    env[node] = result
            elif node.op == "output":
                return [tree_leaves(fx.map_arg(node.args, env.__getitem__)) for env in envs]
        raise AssertionError("the graph has no output")

    def call(self, target: Any, args: list[Any]) -> list[Any]:
        first = [a[0][0] for a in args] if args and args[0][0] else []
        if getattr(target, "namespace", "") == "weft" and target is not torch.ops.weft.agree.default:
            # The pass says of each op that it puts in for how many ranks.
            args = [(a, dict(named)) for a, named in args]
            assert [named.pop("group_size") for _, named in args] == [self.world] * len(args), target
        name = target._opname if isinstance(target, torch._ops.OpOverload) else ""
        if name in ("wait_tensor", "wait_tensors"):
            return first
        if target is c10d.all_gather_into_tensor.default:
            return [torch.cat(first) for _ in first]
        if name.endswith("_coalesced"):
            single = getattr(c10d, name.removesuffix("_coalesced")).default
            each = [[((x, *a[0][1:]), a[1]) for x in a[0][0]] for a in args]
            results = (self.call(single, list(e)) for e in zip(*each, strict=True))
            return [list(r) for r in zip(*results, strict=True)]
        if target is torch.ops.aten.empty.memory_format:
            return [torch.full(a[0], math.nan, dtype=torch.float64) for a, _ in args]
        if target is c10d.all_gather_into_tensor_out.default:
            return [a[1]["out"].copy_(torch.cat(first)) for a in args]
        if target is c10d.reduce_scatter_tensor_out.default:
            parts = self.reduced(first, args[0][0][1]).chunk(self.world)
            return [a[1]["out"].copy_(part) for a, part in zip(args, parts, strict=True)]
        casts = (torch.ops.prims.convert_element_type.default, torch.ops.aten._to_copy.default)
        if target in casts and (args[0][1].get("dtype") or args[0][0][1]).is_floating_point:
            # All in float64: what is compared is what is computed, not how it is rounded.
            return [x.double() if x.dtype != torch.float64 else x.clone() for x in first]
        if target is c10d.reduce_scatter_tensor.default:
            return list(self.reduced(first, args[0][0][1]).contiguous().chunk(self.world))
        if target is c10d.all_reduce.default or target is torch.ops.weft.one_shot_all_reduce.default:
            return [self.reduced(first, args[0][0][1]) for _ in first]
        if name == "fused_matmul_all_reduce":
            whole = self.reduced([a[0][0] @ a[0][1] for a in args], args[0][0][2])
            return [whole.clone() for _ in args]
        if name.startswith("fused_all_reduce_"):
            norm = getattr(self, name.removeprefix("fused_all_reduce_"))
            total = self.reduced(first, "sum")
            return [norm(total, a[0], **a[1]) for a in args]
        if target is torch.ops.weft.fused_matmul_all_gather.default:
            return [torch.cat([a[0][0] @ a[0][1] for a in args], -1) for _ in args]
        if target is torch.ops.weft.one_shot_all_gather.default:
            return [torch.cat(first, args[0][0][1]) for _ in first]
        if target in (c10d.all_to_all_single.default, torch.ops.weft.one_shot_all_to_all.default):
            return [torch.cat([x.chunk(self.world)[r] for x in first]) for r in range(self.world)]
        if target is torch.ops.weft.one_shot_reduce_scatter.default:
            _, op, dim, _ = args[0][0]
            return [p.contiguous() for p in self.reduced(first, op).chunk(self.world, dim)]
        if target is torch.ops.weft.fused_all_gather_matmul.default:
            return [self.all_gather_matmul(first, *a[0][1:3], **a[1]) for a in args]
        if target is torch.ops.weft.fused_matmul_reduce_scatter.default:
            _, _, op, dim, _ = args[0][0]
            factors = [(*a[0][:2], *a[1].get("more", ())) for a in args]
            sums = [sum(A @ B for A, B in zip(f[::2], f[1::2], strict=True)) for f in factors]
            whole = self.reduced(sums, op)
            parts = [p.contiguous() for p in whole.chunk(self.world, dim)]
            for term in ("bias", "residual"):
                given = [a[1].get(term) for a in args]
                parts = [p if t is None else p + t for p, t in zip(parts, given, strict=True)]
            return parts
        return [target(*a, **k) for a, k in args]

    def reduced(self, values: list[Tensor], op: str) -> Tensor:
        total = torch.stack(values).sum(0)
        return total / self.world if op == "avg" else total

    def rms_norm(
        self, total: Tensor, given: Any, weight_offset: float = 0.0, round_sum: bool = True
    ) -> tuple[Tensor, Tensor]:
        _, residual, weight, eps, _ = given
        x = total.clone() if residual is None else total + residual
        return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight + weight_offset), x

    def rms_norm_quant(self, total: Tensor, given: Any, **named: Any) -> tuple[Tensor, Tensor | None, Tensor]:
        quant = {n: named.pop(n, None) for n in ("scale", "out_dtype", "scale_op", "smallest")}
        normed, x = self.rms_norm(total, given, **named)
        largest, scale = torch.finfo(quant["out_dtype"]).max, quant["scale"]
        if scale is None:
            amax, smallest = normed.abs().amax(-1, keepdim=True), quant["smallest"]
            scale = {
                "reciprocal": lambda: (amax / largest).clamp(min=smallest),
                "divide": lambda: amax.clamp(min=smallest) / largest,
                "multiply": lambda: largest / amax.clamp(min=smallest),
            }[quant["scale_op"]]()
        by = scale if quant["scale_op"] == "multiply" else 1 / scale
        numbers = (normed * by.reshape(() if by.numel() == 1 else by.shape)).clamp(-largest, largest)
        return numbers, scale if quant["scale"] is None else None, x

    def layer_norm(self, total: Tensor, given: Any, weight_offset: float = 0.0) -> tuple[Tensor, Tensor]:
        _, residual, weight, bias, eps, _ = given
        x = total.clone() if residual is None else total + residual
        away = x - x.mean(-1, keepdim=True)
        normed = away * (away.square().mean(-1, keepdim=True) + eps).rsqrt()
        normed = normed if weight is None else normed * (weight + weight_offset)
        return normed if bias is None else normed + bias, x

    def all_gather_matmul(
        self, shards: list[Tensor], Bs: list[Tensor], dim: int, return_A: bool = True
    ) -> Any:
        A = torch.cat(shards, dim)
        front = 0 if dim == A.dim() - 1 else dim
        out = [t.movedim(front, 0).contiguous().movedim(0, front) for t in (A, *(A @ B for B in Bs))]
        return (out[0] if return_A else None), out[1:]


def check_meta(node: fx.Node, result: Any) -> None:
    """The shapes and strides are those that the node's metadata promises."""
    said, got = tree_flatten(node.meta["val"])[0], tree_flatten(result)[0]
    assert len(said) == len(got), node
    for a, b in zip(said, got, strict=True):
        if isinstance(b, Tensor):
            shape = tuple(hint(s) for s in a.shape)
            assert shape == b.shape, (node, node.target, shape, b.shape)
            if 0 not in shape:
                strides = [
                    (hint(s), t) for s, t, n in zip(a.stride(), b.stride(), shape, strict=True) if n > 1
                ]
                assert all(s == t for s, t in strides), (node, node.target, strides)
        elif isinstance(b, int):
            assert hint(a) == b, (node, node.target, a, b)


def check_same(seen: Seen, world: int, ranks: Ranks | None = None) -> None:
    """The graphs before and after the pass compute the same from random inputs, with the same strides and aliases, and
    write the same to their inputs.
    """
    ranks = ranks or Ranks(world)
    inputs = ranks.inputs(seen.before)
    after = [[*got, *left] for got, left in zip(ranks.run(seen.after, inputs), ranks.left, strict=True)]
    before = [[*got, *left] for got, left in zip(ranks.run(seen.before, inputs), ranks.left, strict=True)]
    for mine, theirs in zip(after, before, strict=True):
        assert aliases(mine) == aliases(theirs)
        for a, b in zip(mine, theirs, strict=True):
            if isinstance(b, Tensor):
                assert a.shape == b.shape
                assert [s for s, n in zip(a.stride(), a.shape, strict=True) if n > 1] == [
                    s for s, n in zip(b.stride(), b.shape, strict=True) if n > 1
                ]
                assert math.isfinite(b.double().norm())
                torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
            else:
                assert a == b


def aliases(values: list[Any]) -> list[tuple[int, int]]:
    """Which of the values share memory."""
    where = [v.untyped_storage().data_ptr() if isinstance(v, Tensor) and v.numel() else None for v in values]
    return [(i, j) for j, b in enumerate(where) for i, a in enumerate(where[:j]) if a == b is not None]


def traced(fn: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """The graph of a function, op by op as it is written: for spellings that torch itself does not make."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    mode = FakeTensorMode()
    fake = tree_map(mode.from_tensor, inputs)
    with mode:
        return make_fx(fn)(*fake).graph


__all__ = ["AG", "AR", "RS", "Ranks", "Seen", "operator"]
