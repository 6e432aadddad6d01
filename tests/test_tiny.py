"""Everything once, small, on 2 CPU ranks, in less than a minute: the tests to run first.

Every op with its gradients, the graph pass on a compiled function, a pair of parallel layers, and a rank that does not
come, each against float64. Buffers hold NaN before a call, sizes are odd.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
import tiny_exchanges
import tiny_experts
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from opcommon import BOUND, DTYPES, assert_fused, check, gather, poison, world
from ranks import run_row
from torch import Tensor
from weft import fused_ops, symm_mem
from weft.fused_ops.dispatch.plan import forced

WORLD_SIZE = 2
EPS = 1e-5
F32 = BOUND[torch.float32]

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Op:
    """An op, and its float64 reference.

    Args:
        shapes: of a rank's inputs.
        call: the op on a rank's inputs.
        reference: a rank's outputs of its number and all ranks' inputs, by input.
    """

    shapes: tuple[tuple[int, ...], ...]
    call: Callable[..., Outputs]
    reference: Callable[..., Outputs]
    differentiable: bool = True


def all_gather_matmul(dim: int) -> Op:
    def call(shard: Tensor, *Bs: Tensor) -> Outputs:
        A, outs = fused_ops.fused_all_gather_matmul(shard, list(Bs), dim, world())
        assert A is not None
        return A, *outs

    def reference(rank: int, shards: Sequence[Tensor], *Bs: Sequence[Tensor]) -> Outputs:
        A = torch.cat(list(shards), dim)
        return A, *(A @ B[rank] for B in Bs)

    rows = 34 if dim == 1 else 17
    return Op(((13, 17), (rows, 11), (rows, 8)), call, reference)


def matmul_reduce_scatter(dim: int) -> Op:
    def call(A: Tensor, B: Tensor, bias: Tensor, residual: Tensor) -> Outputs:
        terms = {"bias": bias, "residual": residual}
        return (fused_ops.fused_matmul_reduce_scatter(A, B, "sum", dim, world(), **terms),)

    def reference(
        rank: int,
        A: Sequence[Tensor],
        B: Sequence[Tensor],
        bias: Sequence[Tensor],
        residual: Sequence[Tensor],
    ) -> Outputs:
        total = sum_of_products(A, B).chunk(WORLD_SIZE, dim)[rank] + residual[rank]
        if dim == 1:
            return (total + bias[rank],)
        # One bias, of which each rank has a copy, and each copy's gradient is the whole one.
        return (total + bias[rank].detach() + sum(copy - copy.detach() for copy in bias),)

    part = (13, 22) if dim == 0 else (26, 11)
    return Op(((26, 17), (17, 22), part[1:], part), call, reference)


def sum_of_products(As: Sequence[Tensor], Bs: Sequence[Tensor]) -> Tensor:
    return torch.stack([A @ B for A, B in zip(As, Bs, strict=True)]).sum(0)


def all_reduce(reduce_op: str, *, in_place: bool = False) -> Op:
    def call(x: Tensor) -> Outputs:
        if not in_place:
            return (fused_ops.one_shot_all_reduce(x, reduce_op, world()),)
        x = x.clone()
        assert fused_ops.one_shot_all_reduce_(x, reduce_op, world()) is x
        return (x,)

    def reference(rank: int, xs: Sequence[Tensor]) -> Outputs:
        reduce = {"sum": "sum", "avg": "mean", "max": "amax", "min": "amin"}[reduce_op]
        return (getattr(torch.stack(list(xs)), reduce)(0),)

    return Op(((7, 3, 5),), call, reference, not in_place and reduce_op in ("sum", "avg"))


def all_gather(dim: int, *, into: bool = False) -> Op:
    def call(x: Tensor) -> Outputs:
        out = (
            x.new_empty([n * (WORLD_SIZE if i == dim else 1) for i, n in enumerate(x.shape)])
            if into
            else None
        )
        return (fused_ops.one_shot_all_gather(x, dim, world(), out=out),)

    def reference(rank: int, xs: Sequence[Tensor]) -> Outputs:
        return (torch.cat(list(xs), dim),)

    return Op(((7, 3, 5),), call, reference, not into)


def reduce_scatter(dim: int, *, into: bool = False) -> Op:
    def call(x: Tensor) -> Outputs:
        out = torch.empty_like(x.chunk(WORLD_SIZE, dim)[0]) if into else None
        return (fused_ops.one_shot_reduce_scatter(x, "sum", dim, world(), out=out),)

    def reference(rank: int, xs: Sequence[Tensor]) -> Outputs:
        return (torch.stack(list(xs)).sum(0).chunk(WORLD_SIZE, dim)[rank],)

    return Op(((6, 3, 10),), call, reference, not into)


def all_reduce_rms_norm() -> Op:
    def call(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        return fused_ops.fused_all_reduce_rms_norm(x, residual, weight, EPS, world())

    def reference(rank: int, x: Sequence[Tensor], r: Sequence[Tensor], weight: Sequence[Tensor]) -> Outputs:
        sums = torch.stack(list(x)).sum(0) + r[rank]
        return sums / (sums.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[rank], sums

    return Op(((5, 33), (5, 33), (33,)), call, reference)


def all_reduce_rms_norm_quant() -> Op:
    """Of fp8 the scales of rows; the numbers are the norm by them."""

    def call(x: Tensor, residual: Tensor, weight: Tensor) -> Outputs:
        given = x, residual, weight, EPS, world()
        numbers, scales, sums = fused_ops.fused_all_reduce_rms_norm_quant(*given, scale_op="divide")
        steps = fused_ops.fused_all_reduce_rms_norm(*given)[0].float() / scales
        assert torch.equal(numbers.float(), steps.to(numbers.dtype).float())
        return scales.to(x.dtype), sums

    def reference(rank: int, x: Sequence[Tensor], r: Sequence[Tensor], weight: Sequence[Tensor]) -> Outputs:
        sums = torch.stack(list(x)).sum(0) + r[rank]
        normed = sums / (sums.square().mean(-1, keepdim=True) + EPS).sqrt() * weight[rank]
        return normed.abs().amax(-1, keepdim=True) / 448, sums

    return Op(((5, 33), (5, 33), (33,)), call, reference, differentiable=False)


def all_reduce_layer_norm() -> Op:
    def call(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Outputs:
        return fused_ops.fused_all_reduce_layer_norm(x, residual, weight, bias, EPS, world())

    def reference(rank: int, x: Sequence[Tensor], *more: Sequence[Tensor]) -> Outputs:
        residual, weight, bias = (each[rank] for each in more)
        sums = torch.stack(list(x)).sum(0) + residual
        away = sums - sums.mean(-1, keepdim=True)
        return away / (away.square().mean(-1, keepdim=True) + EPS).sqrt() * weight + bias, sums

    return Op(((5, 33), (5, 33), (33,), (33,)), call, reference)


def matmul_all_reduce() -> Op:
    def call(A: Tensor, B: Tensor) -> Outputs:
        return (fused_ops.fused_matmul_all_reduce(A, B, "sum", world()),)

    def reference(rank: int, A: Sequence[Tensor], B: Sequence[Tensor]) -> Outputs:
        return (sum_of_products(A, B),)

    return Op(((3, 5, 17), (17, 11)), call, reference)


def fp8(x: Tensor) -> Tensor:
    return x.float().to(torch.float8_e4m3fn)


def all_gather_scaled_matmul() -> Op:
    def call(shard: Tensor, scale: Tensor, B: Tensor, B_scale: Tensor) -> Outputs:
        given = fp8(shard), [fp8(B).t()], scale.float(), [B_scale.float()], 0, world()
        _, (out,) = fused_ops.fused_all_gather_scaled_matmul(*given, out_dtypes=[shard.dtype])
        return (out,)

    def reference(
        rank: int, shards: Sequence[Tensor], scales: Sequence[Tensor], *B: Sequence[Tensor]
    ) -> Outputs:
        A = torch.cat([fp8(shard).double() * scale for shard, scale in zip(shards, scales, strict=True)])
        return (A @ fp8(B[0][rank]).double().t() * B[1][rank],)

    return Op(((13, 32), (13, 1), (16, 32), (1, 16)), call, reference, differentiable=False)


def scaled_matmul_reduce_scatter() -> Op:
    def call(A: Tensor, scale: Tensor, B: Tensor) -> Outputs:
        given = fp8(A), fp8(B).t(), scale.float(), scale.new_ones(1, 16).float(), "sum", 0, world()
        return (fused_ops.fused_scaled_matmul_reduce_scatter(*given, out_dtype=A.dtype),)

    def reference(rank: int, As: Sequence[Tensor], scales: Sequence[Tensor], Bs: Sequence[Tensor]) -> Outputs:
        scaled = [fp8(A).double() * scale for A, scale in zip(As, scales, strict=True)]
        return (sum_of_products(scaled, [fp8(B).double().t() for B in Bs]).chunk(WORLD_SIZE)[rank],)

    return Op(((26, 32), (26, 1), (16, 32)), call, reference, differentiable=False)


def linear_cross_entropy() -> Op:
    targets = torch.arange(12) % 22

    def call(x: Tensor, weight: Tensor) -> Outputs:
        return (fused_ops.fused_linear_cross_entropy(x, weight, targets, sequence_dim=0).to(x.dtype),)

    def reference(rank: int, xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Outputs:
        return (
            torch.nn.functional.cross_entropy(torch.cat(list(xs)) @ torch.cat(list(weights)).t(), targets),
        )

    return Op(((6, 9), (11, 9)), call, reference, differentiable=False)  # of a loss that all ranks have


OPS = {
    "all_gather_grouped_matmul": Op(*tiny_experts.gathered()),
    "all_gather_matmul": all_gather_matmul(0),
    "all_gather_matmul-last_dim": all_gather_matmul(1),
    "all_gather_scaled_matmul": all_gather_scaled_matmul(),
    "scaled_matmul_reduce_scatter": scaled_matmul_reduce_scatter(),
    "matmul_reduce_scatter": matmul_reduce_scatter(0),
    "matmul_reduce_scatter-last_dim": matmul_reduce_scatter(1),
    **{f"all_reduce-{reduce_op}": all_reduce(reduce_op) for reduce_op in ("sum", "avg", "max", "min")},
    "all_reduce_": all_reduce("sum", in_place=True),
    "all_gather": all_gather(0),
    "all_gather-last_dim": all_gather(2),
    "all_gather_out": all_gather(1, into=True),
    "reduce_scatter": reduce_scatter(0),
    "reduce_scatter-last_dim": reduce_scatter(2),
    "reduce_scatter_out": reduce_scatter(0, into=True),
    "all_to_all": Op(*tiny_exchanges.all_to_all(2, 1)),
    "all_to_all_matmul": Op(*tiny_exchanges.all_to_all_matmul()),
    "matmul_all_gather": Op(*tiny_exchanges.matmul_all_gather()),
    "matmul_all_to_all": Op(*tiny_exchanges.matmul_all_to_all()),
    "gather": Op(*tiny_exchanges.gathered_to_one(1), differentiable=False),
    "all_reduce_rms_norm": all_reduce_rms_norm(),
    "all_reduce_rms_norm_quant": all_reduce_rms_norm_quant(),
    "all_reduce_layer_norm": all_reduce_layer_norm(),
    "matmul_all_reduce": matmul_all_reduce(),
    "grouped_matmul_all_reduce": Op(*tiny_experts.multiplied(None)),
    "grouped_matmul_reduce_scatter": Op(*tiny_experts.multiplied(0)),
    "linear_cross_entropy": linear_cross_entropy(),
    "moe_combine_all_reduce_rms_norm": Op(*tiny_experts.combined(None, EPS)),
    "moe_dispatch": Op(*tiny_experts.sent()),
    "moe_combine_reduce_scatter": Op(*tiny_experts.combined(0, EPS)),
}


def drawn(op: Op, dtype: torch.dtype) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in op.shapes]


def run(op: Op, inputs: list[Tensor]) -> Outputs:
    with forced("fused"):
        outputs = op.call(*inputs)
    assert_fused()
    return outputs


def check_forward(name: str, rank: int, dtype: torch.dtype) -> None:
    op = OPS[name]
    inputs = drawn(op, dtype)
    poison(rank)
    outputs = run(op, inputs)
    wanted = op.reference(rank, *map(gather, inputs))
    for i, (out, want) in enumerate(zip(outputs, wanted, strict=True)):
        assert out.dtype == dtype
        check(f"{name} {dtype}, output {i}", out, want, BOUND[dtype])


def forward(rank: int, world_size: int, name: str, dtype: torch.dtype) -> None:
    check_forward(name, rank, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPS)
def test_forward(name: str, dtype: torch.dtype) -> None:
    run_row(forward, WORLD_SIZE, name, dtype)


def backward(rank: int, world_size: int, name: str) -> None:
    """The gradients of a rank's inputs are those of the sum of all ranks' losses."""
    op = OPS[name]
    inputs = [x.requires_grad_() for x in drawn(op, torch.float32)]
    every = [[x.requires_grad_() for x in gather(x)] for x in inputs]
    outputs = run(op, inputs)
    weights = [torch.randn(out.shape) for out in outputs]
    poison(rank)
    sum((out * w).sum() for out, w in zip(outputs, weights, strict=True)).backward()
    losses = [
        (out * w).sum()
        for other, of_rank in enumerate(zip(*map(gather, weights), strict=True))
        for out, w in zip(op.reference(other, *every), of_rank, strict=True)
    ]
    sum(losses).backward()
    for i, (x, of_ranks) in enumerate(zip(inputs, every, strict=True)):
        check(f"{name}, gradient of input {i}", x.grad, of_ranks[rank].grad, F32)


@pytest.mark.parametrize("name", [name for name, op in OPS.items() if op.differentiable])
def test_backward(name: str) -> None:
    run_row(backward, WORLD_SIZE, name)


def block(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    hidden = funcol.all_gather_tensor(x, 0, world()) @ up
    return funcol.reduce_scatter_tensor(hidden @ down, "sum", 0, world())


def compiled(rank: int, world_size: int) -> None:
    fusion = fused_ops.FusionPass()
    torch._dynamo.reset()
    x, up, down = torch.randn(13, 17), torch.randn(17, 11), torch.randn(11, 7)
    # A graph that Inductor has kept is one that the pass does not see.
    with torch._inductor.config.patch(fx_graph_cache=False):
        y = torch.compile(block, options=fusion.options, fullgraph=True)(x, up, down)
    assert fusion.report().fused == 2, fusion.report()
    A = torch.cat(gather(x))
    parts = [A @ u @ d for u, d in zip(gather(up), gather(down), strict=True)]
    check("compiled", y, torch.stack(parts).sum(0).chunk(world_size)[rank], F32)


def test_the_pass() -> None:
    run_row(compiled, WORLD_SIZE)


def layers(rank: int, world_size: int) -> None:
    up = fused_ops.ColumnParallelLinear(9, 14, group=world(), sequence_parallel=True)
    down = fused_ops.RowParallelLinear(14, 5, group=world(), sequence_parallel=True)
    torch.nn.init.normal_(down.bias)
    dist.broadcast(down.bias.data, 0)
    x = torch.randn(13, 9, requires_grad=True)
    weight = torch.randn(13, 5)
    (down(up(x).relu()) * weight).sum().backward()

    whole_x = torch.cat(gather(x)).requires_grad_()
    cut = {"up.weight": (up.weight, 0), "up.bias": (up.bias, 0), "down.weight": (down.weight, 1)}
    whole = {name: torch.cat(gather(p), dim).requires_grad_() for name, (p, dim) in cut.items()}
    bias = down.bias.detach().double().requires_grad_()
    hidden = torch.nn.functional.linear(whole_x, whole["up.weight"], whole["up.bias"]).relu()
    y = torch.nn.functional.linear(hidden, whole["down.weight"], bias)
    (y * torch.cat(gather(weight))).sum().backward()

    check("y", down(up(x).relu()).detach(), y.detach().chunk(world_size)[rank], F32)
    check("x.grad", x.grad, whole_x.grad.chunk(world_size)[rank], F32)
    check("down.bias.grad", down.bias.grad, bias.grad, F32)
    for name, (p, dim) in cut.items():
        check(f"{name}.grad", p.grad, whole[name].grad.chunk(world_size, dim)[rank], F32)


def test_a_pair_of_layers() -> None:
    run_row(layers, WORLD_SIZE)


def absent(rank: int, world_size: int, name: str) -> None:
    """Rank 1 stays away from a call: rank 0 is told whom it waited for, and both are right again after a reset."""
    check_forward(name, rank, torch.float32)
    before = symm_mem.get_timeout()
    if rank == 0:
        symm_mem.set_timeout(0.2)
        with pytest.raises(symm_mem.PeerTimeout, match=r"rank 0 .*waited 0\.2 s for rank 1: ") as error:
            run(OPS[name], drawn(OPS[name], torch.float32))
        assert error.value.culprit == 1
        symm_mem.set_timeout(before)
    symm_mem.reset()
    check_forward(name, rank, torch.float32)


@pytest.mark.parametrize("name", OPS)
def test_a_rank_that_does_not_come(name: str) -> None:
    run_row(absent, WORLD_SIZE, name)
