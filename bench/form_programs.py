"""The forms of the table that compares weft's pass with torch's: programs of one or two collectives, between two ranks.

Each is a function of tensors under torch.compile: one graph, or a forward and a backward graph where it is trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

WORLD = 2
c10d = torch.ops._c10d_functional


@dataclass(frozen=True)
class Form:
    """``shapes`` are those of a rank's inputs. ``train``: they require gradients. ``alike``: ranks have them alike."""

    name: str
    fn: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    train: bool = False
    dynamic: bool = False
    alike: bool = False


def group() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


def ag(x: Tensor, dim: int = 0) -> Tensor:
    return funcol.all_gather_tensor_autograd(x, dim, group())


def rs(x: Tensor, dim: int = 0, op: str = "sum") -> Tensor:
    if op == "sum":
        return funcol.reduce_scatter_tensor_autograd(x, op, dim, group())
    return funcol.reduce_scatter_tensor(x, op, dim, group())


def ar(x: Tensor, op: str = "sum") -> Tensor:
    return funcol.all_reduce(x, op, group())


def gather_rows(x: Tensor) -> Tensor:
    """Along dimension 0, without torch's spelling of the others."""
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, WORLD, group().group_name))


def scattered_unevenly(y: Tensor) -> Tensor:
    """As DTensor scatters rows that the ranks cannot share: the last part is padded."""
    a, b = y.split((y.shape[0] + 1) // WORLD)
    return rs(torch.cat([a, F.pad(b, (0, 0, 0, 1))]))


def scattered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, "sum", WORLD, group().group_name))


def rows_form(x: Tensor, w: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) @ w


def joined(x: Tensor, order: tuple[int, ...], step: int) -> Tensor:
    """Parts of ``step`` rows of the gathered tensor, in this order, joined along dimension 1."""
    parts = gather_rows(x).split(step)
    return torch.cat([parts[i] for i in order], 1)


def sliced(x: Tensor, starts: tuple[int, ...], step: int) -> Tensor:
    y = gather_rows(x)
    return torch.cat([torch.ops.aten.slice.Tensor(y, 0, i, i + step) for i in starts], 1)


class Copy(torch.autograd.Function):
    """The same forward, an all-reduce backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return ar(grad)


class Reduce(torch.autograd.Function):
    """An all-reduce forward, the same backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return ar(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def mlp(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = ag(x, 1)
    return x + rs(F.linear(F.silu(F.linear(y, a)) * F.linear(y, b), c), 1)


def attention(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
    y = ag(x, 1)
    q, k, v = (F.linear(y, w).unflatten(-1, (2, 8)).transpose(1, 2) for w in (q, k, v))
    z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + rs(F.linear(z.transpose(1, 2).flatten(2), o), 1)


def all_reduced(x: Tensor, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    y = Copy.apply(x)
    return x + Reduce.apply(F.linear(F.silu(F.linear(y, a)) * F.linear(y, b), c))


def each(x: Tensor, *weights: Tensor) -> list[Tensor]:
    return [F.linear(ag(x, 1), w) for w in weights]


def of_one(x: Tensor, *weights: Tensor) -> list[Tensor]:
    y = ag(x, 1)
    return [F.linear(y, w) for w in weights]


def moved_form(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(ag(x.movedim(1, 0).contiguous()).movedim(0, 1).contiguous(), w)


def coalesced(x: Tensor, y: Tensor, w: Tensor) -> list[Tensor]:
    parts = c10d.all_gather_into_tensor_coalesced([x, y], WORLD, group().group_name)
    return [c10d.wait_tensor(p) @ w for p in parts]


def coalesced_after(x: Tensor, w: Tensor, v: Tensor) -> list[Tensor]:
    parts = c10d.reduce_scatter_tensor_coalesced([x @ w, x @ v], "sum", WORLD, group().group_name)
    return [c10d.wait_tensor(p) for p in parts]


def into_new_memory(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    out = y.new_empty(y.shape[0] // WORLD, *y.shape[1:])
    return c10d.wait_tensor(c10d.reduce_scatter_tensor_out(y, "sum", WORLD, group().group_name, out=out))


def normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + ar(x @ w)
    return F.rms_norm(y, y.shape[-1:], weight, 1e-6), y


def vllm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    wide = x.float() + residual.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return normed.to(x.dtype) * weight, wide.to(x.dtype)


def gemma(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    wide = y.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (normed * (1.0 + weight.float())).to(y.dtype), y


def layer_normed(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + ar(x @ w)
    return F.layer_norm(y, y.shape[-1:], weight, weight.sin()), y


def cohere(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    wide = y.float()
    away = wide - wide.mean(-1, keepdim=True)
    return (weight.float() * (away * torch.rsqrt(away.pow(2).mean(-1, keepdim=True) + 1e-6))).to(y.dtype), y


def normed_by(norm: Callable[..., Any]) -> Callable[..., Any]:
    """After a product of 16 bits."""

    def run(x: Tensor, w: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        x, w, residual, weight = (t.bfloat16() for t in (x, w, residual, weight))
        return norm(ar(x @ w), residual, weight)

    return run


def embedded_norm(x: Tensor, w: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(ar(torch.where(x > 0, x, 0) + w), (8,), weight, 1e-6)


def of_experts(x: Tensor, w: Tensor) -> Tensor:
    return ar(torch.zeros(9, 5).index_add(0, torch.arange(12) % 9, x @ w))


def also_given(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return rs(y), y


def lora(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return rs(x @ w + 0.25 * (x @ a @ b))


def three_sums(x: Tensor, *weights: Tensor) -> Tensor:
    a, b, c = (ar(F.linear(x, w)) for w in weights)
    return a + b + c


def biased_after(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = ag(x)
    first = y @ w
    return first, torch.addmm(first.sum(0) + y.sum(), y, w)


def forms() -> Iterator[tuple[str, list[Form]]]:
    """The table's parts: what can be fused, and what must stay as it is or is easily taken for something else."""
    x2, x3, w = (6, 8), (2, 6, 8), (8, 5)
    l3 = (5, 8)
    yield (
        "all-gather, then a product",
        [
            Form("along dimension 0, mm", lambda x, w: ag(x) @ w, (x2, w)),
            Form("along dimension 0 of 3-D, linear", lambda x, w: F.linear(ag(x), w), (x3, l3)),
            Form("along dimension 1 of 3-D, linear", lambda x, w: F.linear(ag(x, 1), w), (x3, l3)),
            Form("along dimension 2 of 4-D, linear", lambda x, w: F.linear(ag(x, 2), w), ((2, 3, 6, 8), l3)),
            Form("along dimension 1, batch 1", lambda x, w: F.linear(ag(x, 1), w), ((1, 6, 8), l3)),
            Form(
                "along dimension 1, dynamic sizes", lambda x, w: F.linear(ag(x, 1), w), (x3, l3), dynamic=True
            ),
            Form("along the last dimension", lambda x, w: ag(x, 1) @ w, ((4, 1024), (2048, 5))),
            Form("slices instead of split", lambda x, w: sliced(x, (0, 2), 2) @ w, (x3, w)),
            Form("moved to dimension 0 and back", moved_form, (x3, l3)),
            Form("one gather, three products", of_one, (x3, l3, l3, l3)),
            Form("one gather, four products", of_one, (x3, l3, l3, l3, l3)),
            Form("three gathers of one tensor", each, (x3, l3, l3, l3)),
            Form("with bias", lambda x, w, b: F.linear(ag(x, 1), w, b), (x3, l3, (5,))),
            Form("gathered tensor also used", lambda x, w: ((y := ag(x)) @ w, y.sum()), (x2, w)),
            Form("cast after the gather", lambda x, w: ag(x).bfloat16() @ w.bfloat16(), (x2, w)),
            Form("bmm of batch 1", lambda x, w: torch.bmm(ag(x)[None], w[None]), (x2, w)),
            Form("einsum", lambda x, w: torch.einsum("bsd,df->bsf", ag(x, 1), w), (x3, w)),
            Form("weight gathered (FSDP)", lambda x, w: F.linear(x, ag(w)), ((7, 8), l3)),
            Form("transposed, a weight's gradient", lambda x, g: g.t() @ ag(x), (x2, (12, 5))),
            Form("coalesced", coalesced, (x2, x2, w)),
            Form("uneven shards", lambda x, w: ag(x)[:11] @ w, (x2, w)),
            Form("a factor behind the gather", lambda x, w: (ag(x) * 1.5) @ w, (x2, w)),
            Form(
                "scaled bias and product", lambda x, w, b: b.addmm(ag(x), w, beta=2, alpha=3), (x2, w, (5,))
            ),
        ],
    )
    yield (
        "product, then reduce-scatter",
        [
            Form("mm, along dimension 0", lambda x, w: rs(x @ w), ((12, 8), w)),
            Form("linear, along dimension 0 of 3-D", lambda x, w: rs(F.linear(x, w)), ((12, 3, 8), l3)),
            Form("linear, along dimension 1 of 3-D", lambda x, w: rs(F.linear(x, w), 1), ((2, 12, 8), l3)),
            Form("linear, along dimension 2 of 4-D", lambda x, w: rs(F.linear(x, w), 2), ((2, 3, 4, 8), l3)),
            Form("batch 1", lambda x, w: rs(F.linear(x, w), 1), ((1, 12, 8), l3)),
            Form("along the last dimension", lambda x, w: rs(x @ w, 1), ((4, 8), (8, 6))),
            Form("with bias", lambda x, w, b: rs(F.linear(x, w, b), 1), ((2, 12, 8), l3, (5,))),
            Form("sum of two products", lambda x, y, w, v: rs(x @ w + y @ v), ((12, 8), (12, 4), w, (4, 5))),
            Form(
                "cast after the product", lambda x, w: rs((x.bfloat16() @ w.bfloat16()).float()), ((12, 8), w)
            ),
            Form("bmm of batch 1", lambda x, w: rs(torch.bmm(x[None], w[None]).squeeze(0)), ((12, 8), w)),
            Form("einsum", lambda x, w: rs(torch.einsum("bsd,df->bsf", x, w), 1), ((2, 12, 8), w)),
            Form(
                "slices instead of split",
                lambda x, w: scattered(torch.cat([(y := F.linear(x, w))[:, :6], y[:, 6:]])),
                ((2, 12, 8), l3),
            ),
            Form(
                "moved to dimension 0 and back",
                lambda x, w: rs(F.linear(x, w).movedim(1, 0).contiguous()).movedim(0, 1),
                ((2, 12, 8), l3),
            ),
            Form("coalesced", coalesced_after, ((12, 8), w, (8, 3))),
            Form("into new memory (_out)", into_new_memory, ((12, 8), w)),
            Form("result also used", lambda x, w: ((y := rs(x @ w)), y.sum()), ((12, 8), w)),
            Form("average", lambda x, w: rs(x @ w, 0, "avg"), ((12, 8), w)),
            Form("residual behind it", lambda x, w, r: r + rs(x @ w), ((12, 8), w, (6, 5))),
            Form("bias behind it", lambda x, w, b: rs(F.linear(x, w), 1) + b, ((2, 12, 8), l3, (5,))),
            Form("uneven shards", lambda x, w: scattered_unevenly(x @ w), ((11, 8), w)),
            Form("doubled, before it is scattered", lambda x, w: rs(2 * (x @ w)), ((12, 8), w)),
            Form("halved, before it is scattered", lambda x, w: rs((x @ w) / 2), ((12, 8), w)),
            Form("difference of two", lambda x, y, w, v: rs(x @ w - y @ v), ((12, 8), (12, 4), w, (4, 5))),
            Form("LoRA, alpha another than the rank", lora, ((12, 8), w, (8, 2), (2, 5))),
            Form(
                "reshaped otherwise",
                lambda x, w: scattered(rows_form(x, w).reshape(4, 6, 5)),
                ((2, 12, 8), w),
            ),
        ],
    )
    yield (
        "product, then all-reduce",
        [
            Form("mm", lambda x, w: ar(x @ w), ((12, 8), w)),
            Form("linear of 3-D", lambda x, w: ar(F.linear(x, w)), ((2, 12, 8), l3)),
            Form("with bias afterwards", lambda x, w, b: ar(F.linear(x, w)) + b, ((2, 12, 8), l3, (5,))),
            Form("sum of two products", lambda x, y, w, v: ar(x @ w + y @ v), ((12, 8), (12, 4), w, (4, 5))),
            Form("bmm of batch 1", lambda x, w: ar(torch.bmm(x[None], w[None])), ((12, 8), w)),
            Form("average", lambda x, w: ar(x @ w, "avg"), ((12, 8), w)),
            Form("negated", lambda x, w: ar(-(x @ w)), ((12, 8), w)),
            Form(
                "LoRA, alpha another than the rank",
                lambda x, w, a, b: ar(x @ w + 0.25 * (x @ a @ b)),
                ((12, 8), w, (8, 2), (2, 5)),
            ),
            Form("residual and norm behind it", normed, ((12, 8), w, (12, 5), (5,))),
            Form("vLLM's norm, of the unrounded sum", normed_by(vllm), ((12, 8), w, (12, 5), (5,))),
            Form("Gemma's norm", normed_by(gemma), ((12, 8), w, (12, 5), (5,))),
            Form(
                "norm without a residual",
                lambda x, w, v: F.rms_norm(ar(x @ w), (5,), v, 1e-6),
                ((12, 8), w, (5,)),
            ),
            Form("residual and LayerNorm behind it", layer_normed, ((12, 8), w, (12, 5), (5,))),
            Form("Cohere's LayerNorm", normed_by(cohere), ((12, 8), w, (12, 5), (5,))),
            Form("three that feed one sum", three_sums, ((2, 12, 8), l3, l3, l3)),
        ],
    )
    yield (
        "all-reduce of no product",
        [
            Form("an embedding's rows", lambda x, w: ar(torch.where(x > 0, x, 0) + w), (x2, x2)),
            Form("an embedding's rows, normed", embedded_norm, (x2, x2, (8,))),
            Form("a mixture of experts", of_experts, ((12, 8), w)),
            Form(
                "joined products",
                lambda a, b, c, d: ar(torch.cat((a @ b, c @ d))),
                ((12, 8), w, (6, 4), (4, 5)),
            ),
            Form("a sum of no product", lambda x, w: ar((x @ w).sum(0)), ((12, 8), w)),
        ],
    )
    up, down = (12, 8), (8, 12)
    head = (16, 8)
    yield (
        "layers, forward and backward",
        [
            Form("feed-forward, sequence parallel", mlp, (x3, up, up, down), train=True),
            Form("attention, sequence parallel", attention, (x3, head, head, head, (8, 16)), train=True),
            Form("feed-forward, batch 1", mlp, ((1, 6, 8), up, up, down), train=True),
            Form("feed-forward, all-reduce", all_reduced, (x3, up, up, down), train=True),
        ],
    )
    yield (
        "near misses",
        [
            Form("gathered parts in another order", lambda x, w: joined(x, (1, 0), 2) @ w, (x3, w)),
            Form("slices in another order", lambda x, w: sliced(x, (2, 0), 2) @ w, (x3, w)),
            Form("slices that overlap", lambda x, w: sliced(x, (0, 1), 2) @ w, (x3, w)),
            Form("one part twice", lambda x, w: joined(x, (0, 0), 2) @ w, (x3, w)),
            Form("more parts than ranks", lambda x, w: joined(x, (0, 1, 2, 3), 1) @ w, (x3, w)),
            Form("rows cut off the gathered tensor", lambda x, w: ag(x)[:10] @ w, (x2, w)),
            Form("rows cut off the joined tensor", lambda x, w: ag(x, 1)[:, :10] @ w, (x3, w)),
            Form("columns cut off", lambda x, w: ag(x)[:, :7] @ w[:7], (x2, w)),
            Form(
                "scattered parts in another order",
                lambda x, w: scattered(torch.cat([(y := F.linear(x, w))[:, 6:], y[:, :6]])),
                ((2, 12, 8), l3),
            ),
            Form(
                "half of the product scattered",
                lambda x, w: scattered(torch.cat([(y := F.linear(x, w))[:, :3], y[:, 3:6]])),
                ((2, 12, 8), l3),
            ),
            Form("a product that is also used", also_given, ((12, 8), w)),
            Form("multiplied by a tensor", lambda x, w, s: rs(s * (x @ w)), ((12, 8), w, ())),
            Form("multiplied by 0", lambda x, w: rs(0 * (x @ w)), ((12, 8), w)),
            Form("reduced by max", lambda x, w: rs(x @ w, 0, "max"), ((12, 8), w)),
            Form("all-reduced by max", lambda x, w: ar(x @ w, "max"), ((12, 8), w)),
            Form(
                "bits read as another type",
                lambda x, w: ag(x.view(torch.int32)).view(torch.bfloat16) @ w.bfloat16(),
                (x2, (16, 5)),
            ),
            Form("a bias computed from the gathered tensor", biased_after, (x2, w)),
            Form("gathered after the product", lambda x, w: ag(x @ w, 1), (x2, w)),
        ],
    )
