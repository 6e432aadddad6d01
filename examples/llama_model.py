"""Llama in plain PyTorch, sharded by torch's own parallelize_module. Nothing in it knows of weft."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    layers: int
    vocabulary: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    seq: int
    batch: int
    dtype: str


SMALL = Sizes(
    layers=2, vocabulary=512, dim=256, heads=8, kv_heads=4, hidden=768, seq=128, batch=2, dtype="float32"
)
# Four of the 32 blocks of Llama 3.1 8B, and a quarter of its vocabulary.
LLAMA_8B = Sizes(
    layers=4,
    vocabulary=32064,
    dim=4096,
    heads=32,
    kv_heads=8,
    hidden=14336,
    seq=4096,
    batch=1,
    dtype="bfloat16",
)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.dim // sizes.heads
        kv_dim = sizes.kv_heads * self.head_dim
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wv = nn.Linear(sizes.dim, kv_dim, bias=False)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        # On a rank the projections give its own heads only: how many there are is what comes out.
        heads = (batch, seq, -1, self.head_dim)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(sizes.dim, sizes.hidden, bias=False)
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)
        self.w3 = nn.Linear(sizes.dim, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class LlamaBlock(nn.Module):
    """[batch, seq, dim] to the same; ``cos`` and ``sin`` are those of ``rotary_tables``."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.attention = Attention(sizes)
        self.ffn_norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.feed_forward = FeedForward(sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocabulary]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleList(LlamaBlock(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim, eps=1e-5)
        self.head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)

    def forward(self, tokens: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.head(self.norm(x))


def rotary_tables(sizes: Sizes, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin, [seq, head_dim / 2], in float64."""
    half = sizes.dim // sizes.heads // 2
    frequencies = 500_000.0 ** -(torch.arange(half, dtype=torch.float64, device=device) / half)
    angles = torch.outer(torch.arange(sizes.seq, dtype=torch.float64, device=device), frequencies)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [batch, heads, seq, head_dim], computed in the tables' precision."""
    a, b = x.to(cos.dtype).chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def shard(model: Llama, mesh: DeviceMesh, sequence: bool = True, loss: bool = True) -> None:
    """Cut the weights over the ranks.

    Args:
        sequence: the activations between the products are cut, too, along the sequence.
        loss: the logits stay cut along the vocabulary, for a loss under ``loss_parallel()``.
    """
    whole, cut = Replicate(), Shard(1)
    between = cut if sequence else whole
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=between),
            "head": ColwiseParallel(
                input_layouts=between,
                output_layouts=Shard(-1) if loss else whole,
                use_local_output=not loss,
            ),
            **({"norm": SequenceParallel()} if sequence else {}),
        },
    )
    plan = {
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w3": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
    }
    if sequence:
        plan |= {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(cut, None, None), desired_input_layouts=(whole, None, None)
            ),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(whole,)),
        }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
