"""Tensor-parallel layers written by hand, as Megatron writes them, over functional and over plain collectives."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from compiled import CODEGEN, Outcome, check, outcomes, program
from graphs import Copied, Reduced
from torch import Tensor, nn
from torch.nn import functional as F

WORLD = 2
SEQUENCE, BATCH, DIM, HIDDEN, HEADS = 10, 2, 24, 40, 4


def world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


class Gather(torch.autograd.Function):
    """Along the sequence, dimension 0, where each rank has a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, world())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(grad, "sum", 0, world())


class Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return funcol.reduce_scatter_tensor(x, "sum", 0, world())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return funcol.all_gather_tensor(grad, 0, world())


class GatheringLinear(torch.autograd.Function):
    """Megatron's linear layer with sequence parallelism: it saves its part of the input, and gathers again.

    Plain collectives write into what they are given; torch.compile makes functional ones of them.
    """

    @staticmethod
    def gathered(x: Tensor) -> Tensor:
        out = x.new_empty(x.shape[0] * WORLD, *x.shape[1:])
        dist.all_gather_into_tensor(out, x)
        return out

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return GatheringLinear.gathered(x) @ weight.t()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        whole = GatheringLinear.gathered(x)
        dx = grad @ weight
        mine = dx.new_empty(dx.shape[0] // WORLD, *dx.shape[1:])
        dist.reduce_scatter_tensor(mine, dx)
        return mine, grad.flatten(0, -2).t() @ whole.flatten(0, -2)


class Block(nn.Module):
    """Attention and feed-forward of [sequence, batch, dim]; whole, or one rank's part."""

    def __init__(self, parts: int = 1) -> None:
        super().__init__()
        self.heads = HEADS // parts
        self.qkv = nn.Parameter(torch.empty(3 * DIM // parts, DIM))
        self.qkv_bias = nn.Parameter(torch.empty(3 * DIM // parts))
        self.o = nn.Parameter(torch.empty(DIM, DIM // parts))
        self.o_bias = nn.Parameter(torch.empty(DIM))
        self.up = nn.Parameter(torch.empty(HIDDEN // parts, DIM))
        self.down = nn.Parameter(torch.empty(DIM, HIDDEN // parts))

    def attention(self, qkv: Tensor) -> Tensor:
        s, b, _ = qkv.shape
        q, k, v = (t.permute(1, 2, 0, 3) for t in qkv.view(s, b, self.heads, -1).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).reshape(s, b, -1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.linear(self.attention(F.linear(x, self.qkv, self.qkv_bias)), self.o) + self.o_bias
        return x + F.linear(F.gelu(F.linear(x, self.up)), self.down)

    @staticmethod
    def cut(name: str) -> int:
        """The dimension along which this weight is cut over the ranks."""
        return 1 if name in ("o", "down") else 0

    def part(self, rank: int) -> Block:
        """This rank's, with the same weights."""
        mine = Block(WORLD).to(torch.float32)
        for name, parameter in self.named_parameters():
            piece = parameter if name == "o_bias" else parameter.chunk(WORLD, self.cut(name))[rank]
            getattr(mine, name).data.copy_(piece.data)
        return mine

    def whole_gradients(self) -> dict[str, Tensor]:
        """Of all ranks' parts."""
        found = {}
        for name, parameter in self.named_parameters():
            assert parameter.grad is not None
            pieces = [torch.empty_like(parameter.grad) for _ in range(WORLD)]
            dist.all_gather(pieces, parameter.grad.contiguous())
            found[name] = pieces[0] if name == "o_bias" else torch.cat(pieces, self.cut(name))
        return found


class Tensors(Block):
    """Tensor parallelism."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(Copied.apply(x), self.qkv, self.qkv_bias)
        x = x + Reduced.apply(F.linear(self.attention(qkv), self.o)) + self.o_bias
        return x + Reduced.apply(F.linear(F.gelu(F.linear(Copied.apply(x), self.up)), self.down))


class Sequence(Block):
    """Tensor and sequence parallelism, with functional collectives."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = F.linear(Gather.apply(x), self.qkv, self.qkv_bias)
        # Every rank adds the bias to its part of the sequence, so that its gradient is a part, too.
        x = x + Scatter.apply(F.linear(self.attention(qkv), self.o)) + Copied.apply(self.o_bias)
        return x + Scatter.apply(F.linear(F.gelu(F.linear(Gather.apply(x), self.up)), self.down))


class Plain(Block):
    """The same with plain collectives; the backward pass gathers again, but torch.compile sees that it is the same."""

    def forward(self, x: Tensor) -> Tensor:
        qkv = GatheringLinear.apply(x, self.qkv) + self.qkv_bias
        x = x + Scatter.apply(F.linear(self.attention(qkv), self.o)) + Copied.apply(self.o_bias)
        return x + Scatter.apply(F.linear(F.gelu(GatheringLinear.apply(x, self.up)), self.down))


def train(rank: int, world_size: int, kind: type[Block], codegen: bool) -> Outcome:
    torch.manual_seed(os.getppid())
    exact = Block().double()
    for parameter in exact.parameters():
        nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    x = torch.randn(SEQUENCE, BATCH, DIM)
    grad = torch.randn_like(x)
    model = exact.part(rank)
    model.__class__ = kind
    along = kind is not Tensors
    mine, given = (t.chunk(world_size)[rank].contiguous() if along else t.clone() for t in (x, grad))
    mine.requires_grad_()
    whole = x.double().requires_grad_()
    with program(codegen) as p:
        got, want = p.compile(model, fullgraph=True)(mine), exact(whole)
        got.backward(given)
        want.backward(grad.double())

        def piece(t: Tensor) -> Tensor:
            return t.chunk(world_size)[rank] if along else t

        p.compare("output", got, piece(want))
        assert mine.grad is not None
        assert whole.grad is not None
        p.compare("gradient of x", mine.grad, piece(whole.grad))
        for name, t in model.whole_gradients().items():
            wanted = getattr(exact, name).grad
            p.compare(f"gradient of {name}", t, wanted)
        return p.outcome()


# With sequence parallelism the gradient of the bias that each rank adds to its part is reduced, too.
CASES: dict[str, tuple[type[Block], int]] = {
    "tensor parallel": (Tensors, 2 + 2),
    "sequence parallel": (Sequence, 4 + 5),
    "plain collectives": (Plain, 4 + 5),
}


@CODEGEN
@pytest.mark.parametrize("name", CASES)
def test_training(name: str, codegen: bool) -> None:
    kind, fused = CASES[name]
    check(outcomes(train, WORLD, kind, codegen), fused, [])
