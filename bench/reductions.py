"""The contenders of the ops fused around an all-reduce; contenders.py says who is who.

all_reduce_rms_norm, all_reduce_layer_norm: the others all-reduce first, then add and norm by torch.compile (on the CPU
by plain torch).
matmul_all_reduce: the others multiply first. "torch" is torch's one-shot, "torch two-shot" its two-shot all-reduce.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import torch
import torch.distributed as dist
from accuracy import Expected, of_products, of_sums
from parts import Bench, after_producer, divisible, has_torch_symm, random_tensor, sets_of, summed, symmetric
from registry import LAYER_NORM, Row
from timer import Call
from torch import Tensor
from weft.fused_ops import fused_all_reduce_layer_norm, fused_all_reduce_rms_norm, fused_matmul_all_reduce

EPS = 1e-6


def add_and_norm(x: Tensor, residual: Tensor, weight: Tensor, *bias: Tensor) -> tuple[Tensor, Tensor]:
    """With a bias the LayerNorm."""
    sums = x + residual
    shape = (sums.shape[-1],)
    if bias:
        return torch.nn.functional.layer_norm(sums, shape, weight, bias[0], EPS), sums
    return torch.nn.functional.rms_norm(sums, shape, weight, EPS), sums


@cache
def _compiled(shape: torch.Size, op: str) -> Callable[..., tuple[Tensor, Tensor]]:
    """One for each shape: no contender pays for dynamic sizes."""
    return torch.compile(add_and_norm, dynamic=False)


def expected_norm(total: Tensor, terms: Tensor, given: Sequence[Tensor], world: int) -> list[Expected]:
    """The normed sums and the sums, of this many ranks; ``given`` are residual and weight."""
    residual, weight = given
    dtype, sums, terms = residual.dtype, total + residual, terms + residual.double().abs()
    scale = (sums.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    # After the sums: the scale, which their errors move by less, the product with it, that with the weight.
    normed = of_sums(sums * scale, terms * scale.abs(), world + 3, dtype)
    # The mean's sum is made in float32, in any order: a rounding for each of its terms, half of it after the root.
    normed.allowed.add_(normed.reference.abs(), alpha=sums.shape[-1] / 2 * torch.finfo(torch.float32).eps / 2)
    return [normed, of_sums(sums, terms, world, dtype)]


def expected_layer_norm(total: Tensor, terms: Tensor, given: Sequence[Tensor], world: int) -> list[Expected]:
    """The same of a LayerNorm; ``given`` are residual, weight and bias."""
    residual, weight, bias = given
    dtype, sums, terms = residual.dtype, total + residual, terms + residual.double().abs()
    away = sums - sums.mean(-1, keepdim=True)
    scale = (away.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight
    # As above, and after it the bias. The mean is off by as much as the sums are.
    sizes = (terms + terms.mean(-1, keepdim=True)) * scale.abs() + bias.double().abs()
    normed = of_sums(away * scale + bias, sizes, world + 4, dtype)
    normed.allowed.add_(sizes, alpha=sums.shape[-1] / 2 * torch.finfo(torch.float32).eps / 2)
    return [normed, of_sums(sums, terms, world, dtype)]


def all_reduce_norm_contenders(row: Row, group: str, device: torch.device) -> Bench:
    world, shape = dist.get_world_size(), (row.M, row.N)
    layer = row.op == LAYER_NORM
    source = random_tensor(shape, row.dtype, device)
    given = [random_tensor(s, row.dtype, device) for s in (shape, shape[1:], shape[1:])[: 2 + layer]]
    for tensor in given:
        dist.broadcast(tensor, 0)
    if layer:
        expected = expected_layer_norm(*summed(source), given, world)
    else:
        expected = expected_norm(*summed(source), given, world)
    plain = torch.empty_like(source)
    norm = _compiled(source.shape, row.op) if device.type == "cuda" else add_and_norm
    fused: Callable[..., Sequence[Tensor]] = (
        fused_all_reduce_layer_norm if layer else fused_all_reduce_rms_norm
    )

    def unfused() -> Sequence[Tensor]:
        dist.all_reduce(plain)
        return norm(plain, *given)

    def weft() -> Sequence[Tensor]:
        return fused(plain, *given, EPS, group)

    calls = {
        "weft": after_producer(plain, source, weft),
        "unfused": after_producer(plain, source, unfused),
        "producer": after_producer(plain, source, lambda: (plain,)),
    }
    if has_torch_symm(group, device):
        there = symmetric(source, group)
        one, two = torch.ops.symm_mem.one_shot_all_reduce, torch.ops.symm_mem.two_shot_all_reduce_

        def normed(reduce: Callable[[Tensor, str, str], Tensor]) -> Call:
            return after_producer(there, source, lambda: norm(reduce(there, "sum", group), *given))

        calls |= {"torch": normed(one), "torch two-shot": normed(two)}
    return Bench(calls, expected, 1, 0.0, 2 * (world - 1) / world * source.nbytes)


def matmul_all_reduce_contenders(row: Row, group: str, device: torch.device) -> Bench:
    assert row.K is not None
    world = dist.get_world_size()
    k, size = divisible(row.K, world, "K", row), row.dtype.itemsize
    sets = sets_of((row.M * k + k * row.N) * size, device)
    lefts = [random_tensor((row.M, k), row.dtype, device) for _ in range(sets)]
    weights = [random_tensor((k, row.N), row.dtype, device) / math.sqrt(row.K) for _ in range(sets)]
    # A product's rounding, and one at each hop of a ring.
    expected = of_products(*summed(lefts[0].double() @ weights[0].double()), world, row.dtype)

    def weft(i: int) -> Sequence[Tensor]:
        return (fused_matmul_all_reduce(lefts[i], weights[i], "sum", group),)

    def unfused(i: int) -> Sequence[Tensor]:
        out = torch.mm(lefts[i], weights[i])
        dist.all_reduce(out)
        return (out,)

    def product(i: int) -> Sequence[Tensor]:
        return (torch.mm(lefts[i], weights[i]),)

    calls: dict[str, Call] = {"weft": weft, "unfused": unfused, "product": product}
    if has_torch_symm(group, device):
        there = symmetric(lefts[0].new_empty(row.M, row.N), group)

        def after_product(reduce: Callable[[Tensor, str, str], Tensor]) -> Call:
            def call(i: int) -> Sequence[Tensor]:
                torch.mm(lefts[i], weights[i], out=there)
                return (reduce(there, "sum", group),)

            return call

        calls["torch"] = after_product(torch.ops.symm_mem.one_shot_all_reduce)
        calls["torch two-shot"] = after_product(torch.ops.symm_mem.two_shot_all_reduce_)
    received = 2 * (world - 1) / world * row.M * row.N * size
    return Bench(calls, [expected], sets, 2.0 * row.M * k * row.N, received)
