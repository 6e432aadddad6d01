"""Layers sharded by hand as serving engines and fine-tuning write them: vLLM's decoder, LoRA, a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from compiled import CODEGEN, Outcome, check, outcomes, program
from torch import Tensor

WORLD, HIDDEN, INNER, HEADS, VOCABULARY, LAYERS, EXPERTS = 2, 32, 48, 4, 40, 2, 4
Collective = Callable[[Tensor], Tensor]


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def all_reduced(x: Tensor) -> Tensor:
    return funcol.all_reduce(x, "sum", group())


def same(x: Tensor) -> Tensor:
    """What a collective is to the one rank of the unsharded model."""
    return x


def drawn(*shapes: tuple[int, ...]) -> list[Tensor]:
    """The same on all ranks, in float64."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(s, generator=generator, dtype=torch.float64) / s[0] ** 0.5 for s in shapes]


def mine(w: Tensor, dim: int, rank: int) -> Tensor:
    """This rank's part of a parameter, as a model in float32 has it."""
    return w.chunk(WORLD, dim)[rank].float().contiguous()


def norm(x: Tensor, residual: Tensor | None, weight: Tensor) -> tuple[Tensor, Tensor]:
    """RMSNorm of vLLM: with a residual it norms the sum, and gives that, too."""
    dtype = x.dtype
    wide = x.to(torch.promote_types(dtype, torch.float32))
    if residual is not None:
        wide = wide + residual.to(wide.dtype)
    stored = wide.to(dtype)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return wide.to(dtype) * weight, stored


def decoder(tokens: Tensor, start: int, p: list[Tensor], reduce: Collective) -> Tensor:
    """``start``: the first row of the vocabulary that ``p`` has."""
    embedding, last, *layers = p
    inside = (tokens >= start) & (tokens < start + embedding.shape[0])
    rows = F.embedding(torch.where(inside, tokens - start, 0), embedding)
    x, residual = reduce(torch.where(inside[..., None], rows, 0.0)), None
    for first in range(0, len(layers), 8):
        before, q, k, v, o, between, up, down = layers[first : first + 8]
        h, residual = norm(x, residual, before)
        heads = [(h @ w).unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for w in (q, k, v)]
        z = F.scaled_dot_product_attention(*heads, is_causal=True)
        h, residual = norm(reduce(z.transpose(1, 2).flatten(2) @ o), residual, between)
        x = reduce(F.silu(h @ up) @ down)
    return norm(x, residual, last)[0]


def decode(rank: int, world: int, codegen: bool, **options: Any) -> Outcome:
    square, row = (HIDDEN, HIDDEN), (HIDDEN,)
    layer = [row, square, square, square, square, row, (HIDDEN, INNER), (INNER, HIDDEN)]
    p = drawn((VOCABULARY, HIDDEN), row, *(layer * LAYERS))
    dims = [0, None, *([None, 1, 1, 1, 0, None, 1, 0] * LAYERS)]
    shards = [w.float() if d is None else mine(w, d, rank) for w, d in zip(p, dims, strict=True)]
    tokens = torch.arange(18).view(2, 9) * 7 % VOCABULARY
    with program(codegen, **options) as run, torch.no_grad():
        compiled = run.compile(decoder)
        got = compiled(tokens, rank * VOCABULARY // WORLD, shards, all_reduced)
        run.compare("hidden", got, decoder(tokens, 0, p, same))
        return run.outcome()


@CODEGEN
def test_a_decoder_of_vllm(codegen: bool) -> None:
    found = outcomes(decode, WORLD, codegen)
    # The embedding's reduction, and two of each layer; a norm after each.
    check(found, 1 + 2 * LAYERS, [])
    assert "one_shot_all_reduce" not in found[0].text, found[0].text


def adapted(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return x @ w + 0.25 * (x @ a @ b)


def feed_forward(x: Tensor, p: list[Tensor], gather: Collective, scatter: Collective) -> Tensor:
    return x + scatter(adapted(F.silu(adapted(gather(x), *p[:3])), *p[3:]))


def gathered(x: Tensor) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, 0, group())


def scattered(x: Tensor) -> Tensor:
    return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, group())


def tune(rank: int, world: int, codegen: bool) -> Outcome:
    """Sequence parallel, the layers frozen."""
    p = drawn(
        (HIDDEN, INNER), (HIDDEN, 4), (4, INNER), (INNER, HIDDEN), (INNER, 4), (4, HIDDEN), (10, HIDDEN)
    )
    *whole, x = p
    dims = [1, None, 1, 0, 0, None]
    shards = [w.float() if d is None else mine(w, d, rank) for w, d in zip(whole, dims, strict=True)]
    own = mine(x, 0, rank).requires_grad_()
    for i in (1, 2, 4, 5):
        whole[i].requires_grad_()
        shards[i].requires_grad_()
    x.requires_grad_()
    with program(codegen) as run:
        got = run.compile(feed_forward)(own, shards, gathered, scattered)
        want = feed_forward(x, whole, same, same)
        run.compare("y", got, want.chunk(WORLD)[rank])
        got.sin().sum().backward()
        want.sin().sum().backward()
        assert own.grad is not None and x.grad is not None
        run.compare("gradient of x", own.grad, x.grad.chunk(WORLD)[rank])
        for i, dim in ((2, 1), (4, 0)):
            wanted: Any = whole[i].grad
            run.compare(f"gradient {i}", shards[i].grad, wanted.chunk(WORLD, dim)[rank])  # type: ignore[arg-type]
        return run.outcome()


@CODEGEN
def test_lora(codegen: bool) -> None:
    check(outcomes(tune, WORLD, codegen), 4, [])


def experts(x: Tensor, weight: Tensor, gates: Tensor, p: list[Tensor], reduce: Collective) -> Tensor:
    """Of those experts that ``p`` has; ``gates`` are their shares of each token."""
    out = torch.zeros_like(x)
    for e, (up, down) in enumerate(zip(p[::2], p[1::2], strict=True)):
        out = out + gates[:, e : e + 1] * (F.silu(x @ up) @ down)
    return norm(reduce(out), x, weight)[0]


def mix(rank: int, world: int, codegen: bool) -> Outcome:
    p = drawn((12, HIDDEN), (HIDDEN,), (HIDDEN, EXPERTS), *([(HIDDEN, INNER), (INNER, HIDDEN)] * EXPERTS))
    x, weight, router, *whole = p
    gates = (x @ router).softmax(-1)
    count = EXPERTS // WORLD
    own = [w.float() for w in whole[2 * count * rank : 2 * count * (rank + 1)]]
    with program(codegen) as run, torch.no_grad():
        given = x.float(), weight.float(), mine(gates, 1, rank)
        got = run.compile(experts)(*given, own, all_reduced)
        run.compare("y", got, experts(x, weight, gates, whole, same))
        return run.outcome()


@CODEGEN
def test_a_mixture_of_experts(codegen: bool) -> None:
    found = outcomes(mix, WORLD, codegen)
    check(found, 1, [])
    assert "all_reduce → add → rms_norm" in found[0].text
