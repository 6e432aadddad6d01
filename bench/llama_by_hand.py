"""Llama sharded by hand, as inference engines do: plain tensors, with functional collectives between the products."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F


def shard_by_hand(model: Any, group: dist.ProcessGroup) -> None:
    """Cut a Llama's weights over the ranks, as llama_model.py's ``shard(..., sequence=False, loss=False)`` does."""
    for layer in model.layers:
        attention, ffn = layer.attention, layer.feed_forward
        for linear in (attention.wq, attention.wk, attention.wv, ffn.w1, ffn.w3):
            linear.weight = _part(linear.weight, 0, group)
        attention.wo = _Summed(attention.wo, group)
        ffn.w2 = _Summed(ffn.w2, group)
    model.embedding = _Embedding(model.embedding, group)
    model.head = _Gathered(model.head, group)


def _part(weight: Tensor, dim: int, group: dist.ProcessGroup) -> nn.Parameter:
    return nn.Parameter(weight.detach().chunk(group.size(), dim)[group.rank()].clone())


class _Summed(nn.Module):
    """A linear layer of whose columns each rank has a part."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = _part(linear.weight, 1, group), group

    def forward(self, x: Tensor) -> Tensor:
        return funcol.all_reduce(F.linear(x, self.weight), "sum", self.group)


class _Gathered(nn.Module):
    """A linear layer of whose rows each rank has a part."""

    def __init__(self, linear: nn.Linear, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = _part(linear.weight, 0, group), group

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight)
        return funcol.all_gather_tensor(y, y.dim() - 1, self.group)


class _Embedding(nn.Module):
    """Each rank has a part of the vocabulary."""

    def __init__(self, embedding: nn.Embedding, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight, self.group = _part(embedding.weight, 0, group), group
        self.first = group.rank() * self.weight.shape[0]

    def forward(self, tokens: Tensor) -> Tensor:
        here = tokens - self.first
        foreign = (here < 0) | (here >= self.weight.shape[0])
        x = F.embedding(here.masked_fill(foreign, 0), self.weight)
        return funcol.all_reduce(x.masked_fill(foreign[..., None], 0), "sum", self.group)
