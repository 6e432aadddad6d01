"""What a random program is, and the machine that runs it: a list of steps, plain data, that every rank can be sent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch_versions import as_collectives_take

Step = tuple[Any, ...]  # the name of a method of Machine, and its arguments

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


@dataclass
class Random:
    """A program for ``world`` ranks. ``inputs`` are shapes and dtypes, ``outputs`` numbers of values."""

    world: int
    steps: list[Step] = field(default_factory=list)
    inputs: list[tuple[tuple[int, ...], torch.dtype]] = field(default_factory=list)
    outputs: list[int] = field(default_factory=list)
    dynamic: bool = False  # sizes are symbolic
    normalized: bool = True  # as Inductor does it, before it calls the pass
    alone: bool | str = False  # collectives that go with no product are fused, too
    rows: bool = False  # sequence parallel
    shared: list[int] = field(default_factory=list)  # inputs that all ranks have alike where that is so
    own_numbers: bool = False  # each rank multiplies by other numbers


class Machine:
    """Runs steps one by one; each appends its values to ``values``.

    ``groups``: names of process groups, all of the same ranks. None on meta tensors, where nothing communicates.
    """

    def __init__(
        self, world: int, inputs: list[Tensor], groups: list[str] | None, own_factor: int = 1
    ) -> None:
        self.world, self.groups = world, groups
        self.own_factor = own_factor
        self.inputs = inputs
        self.values: list[Tensor] = []

    def run(self, step: Step) -> None:
        name, *args = step
        result = getattr(self, name)(*args)
        self.values += result if isinstance(result, (list, tuple)) else [result]

    def input(self, i: int) -> Tensor:
        return self.inputs[i]

    def gather(self, i: int, group: int, spelling: str = "") -> Tensor | list[Tensor]:
        x = as_collectives_take(self.values[i])
        shape = [self.world * x.shape[0], *x.shape[1:]]
        if self.groups is None:
            return [x.new_empty(shape)] * (2 if spelling == "coalesced" else 1)
        where = (self.world, self.groups[group])
        if spelling == "coalesced":
            return [c10d.wait_tensor(t) for t in c10d.all_gather_into_tensor_coalesced([x, x + 1], *where)]
        if spelling == "out":
            return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, *where, out=x.new_empty(shape)))
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, *where))

    def scatter(self, i: int, op: str, group: int, spelling: str = "") -> Tensor | list[Tensor]:
        x = as_collectives_take(self.values[i])
        if self.groups is None:
            out = x.new_empty([x.shape[0] // self.world, *x.shape[1:]])
            return [out] * (2 if spelling == "coalesced" else 1)
        where = (op, self.world, self.groups[group])
        if spelling == "coalesced":
            return [c10d.wait_tensor(t) for t in c10d.reduce_scatter_tensor_coalesced([x, x + 1], *where)]
        if spelling == "out":
            out = x.new_empty([x.shape[0] // self.world, *x.shape[1:]])
            return c10d.wait_tensor(c10d.reduce_scatter_tensor_out(x, *where, out=out))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x, *where))

    def reduce(self, i: int, op: str, group: int, spelling: str = "") -> Tensor | list[Tensor]:
        x = self.values[i]
        if self.groups is None:
            return [torch.empty_like(x)] * (2 if spelling == "coalesced" else 1)
        if spelling == "coalesced":
            both = c10d.all_reduce_coalesced([x, x + 1], op, self.groups[group])
            return [c10d.wait_tensor(t) for t in both]
        if spelling == "in place":
            return c10d.wait_tensor(c10d.all_reduce_(x, op, self.groups[group]))
        return c10d.wait_tensor(c10d.all_reduce(x, op, self.groups[group]))

    def cut(self, i: int, dim: int, spelling: str, bounds: list[tuple[int, int]]) -> list[Tensor]:
        x, step = self.values[i], bounds[0][1] - bounds[0][0]
        if spelling == "slice":
            return [aten.slice.Tensor(x, dim, a, b) for a, b in bounds]
        if spelling == "split":
            parts = aten.split.Tensor(x, step, dim)
        else:
            parts = aten.split_with_sizes.default(x, [step] * (x.shape[dim] // step), dim)
        return [parts[a // step] for a, _ in bounds]

    def unbind(self, i: int, count: int, order: list[int]) -> list[Tensor]:
        """Dimension 0, seen as ``count`` parts."""
        x = self.values[i]
        parts = x.reshape(count, x.shape[0] // count, *x.shape[1:]).unbind(0)
        return [parts[k] for k in order]

    def cat(self, parts: list[int], dim: int) -> Tensor:
        return torch.cat([self.values[i] for i in parts], dim)

    def reshape(self, i: int, shape: list[int]) -> Tensor:
        return self.values[i].reshape(shape)

    def flatten(self, i: int) -> Tensor:
        return self.values[i].reshape(-1, self.values[i].shape[-1])

    def permute(self, i: int, dims: list[int]) -> Tensor:
        return self.values[i].permute(dims)

    def slice(self, i: int, dim: int, start: int, end: int) -> Tensor:
        return aten.slice.Tensor(self.values[i], dim, start, end)

    def padded(self, i: int, dim: int, value: int) -> Tensor:
        """Cut into a part for each rank, those that are short padded: as DTensor scatters uneven shards."""
        x = self.values[i]
        size = -(-x.shape[dim] // self.world)
        parts = [*x.split(size, dim)]
        parts += [x.new_zeros([*x.shape[:dim], 0, *x.shape[dim + 1 :]])] * (self.world - len(parts))
        after = [0, 0] * (x.dim() - 1 - dim)
        short = [size - part.shape[dim] for part in parts]
        padded = [
            aten.constant_pad_nd.default(part, [*after, 0, n], value) if n else part
            for part, n in zip(parts, short, strict=True)
        ]
        return torch.cat(padded, dim)

    def unsqueeze(self, i: int, dim: int) -> Tensor:
        return self.values[i].unsqueeze(dim)

    def squeeze(self, i: int) -> Tensor:
        return self.values[i].squeeze()

    def clone(self, i: int) -> Tensor:
        return self.values[i].clone(memory_format=torch.contiguous_format)

    def wait(self, i: int) -> Tensor:
        """Once more, or for what was never on its way."""
        return self.values[i] if self.groups is None else c10d.wait_tensor(self.values[i])

    def cast(self, i: int, dtype: torch.dtype) -> Tensor:
        return aten._to_copy.default(self.values[i], dtype=dtype)

    def mm(self, i: int, j: int) -> Tensor:
        return torch.mm(self.values[i], self.values[j])

    def linear(self, i: int, j: int) -> Tensor:
        return torch.nn.functional.linear(self.values[i], self.values[j].t())

    def bmm(self, i: int, j: int) -> Tensor:
        return torch.bmm(self.values[i], self.values[j])

    def addmm(self, bias: int, i: int, j: int, beta: int, alpha: int) -> Tensor:
        values = self.values
        return torch.addmm(values[bias], values[i], values[j], beta=beta, alpha=alpha)

    def add(self, i: int, j: int, alpha: int = 1) -> Tensor:
        return torch.add(self.values[i], self.values[j], alpha=alpha * self.own_factor)

    def sub(self, i: int, j: int, alpha: int = 1) -> Tensor:
        return torch.sub(self.values[i], self.values[j], alpha=alpha * self.own_factor)

    def number(self, i: int, spelling: str, number: float) -> Tensor:
        x = self.values[i]
        if spelling == "left":
            return aten.add.Tensor(number, x)
        if spelling == "factor":
            return aten.mul.Tensor(x, (number + 1) * self.own_factor)
        if spelling == "divisor":
            return aten.div.Tensor(x, number * self.own_factor)
        return {"add": aten.add, "sub": aten.sub}[spelling].Tensor(x, number)

    def unary(self, i: int, name: str) -> Tensor:
        return getattr(torch, name)(self.values[i])

    def norm(self, i: int, weight: int, kind: str = "") -> Tensor:
        """In float32, as Hugging Face's Llama has it, or as its Gemma; or LayerNorms."""
        x, factor = self.values[i].to(torch.float32), self.values[weight]
        if kind.startswith("layer"):
            variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
            x = (x - mean) * torch.rsqrt(variance + 1e-5) * factor
            return (x + factor if kind == "layer, bias" else x).to(self.values[i].dtype)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
        if kind == "Gemma":
            return (x * (1.0 + factor.float())).to(self.values[i].dtype)
        return (factor * x.to(self.values[i].dtype)).to(self.values[i].dtype)

    def norm_of_sum(self, i: int, residual: int, weight: int) -> list[Tensor]:
        """Of the sum in float32, as vLLM has it, and the sum."""
        x = self.values[i]
        wide = x.to(torch.float32) + self.values[residual]
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return [(normed.to(x.dtype) * self.values[weight]).to(x.dtype), wide.to(x.dtype)]

    def in_fp8(self, i: int, scale: int | None, kind: str) -> Tensor:
        """What comes of it again, by a given scale or one of each row: as vLLM, torchao's quantize_ or its Float8Linear
        has it, or none of them."""
        x, largest = self.values[i], 448.0
        wide, amax = x.to(torch.float32), x.abs().amax(-1, keepdim=True)
        if scale is not None:
            by = self.values[scale].abs() + 0.5
        elif kind == "multiply":
            by = (largest / amax.to(torch.float64).clamp(min=1e-12)).to(torch.float32)
        elif kind == "divide":
            by = (amax.clamp(min=1e-5) / largest).to(torch.float32)
        else:
            by = (amax.to(torch.float32) / (largest if kind == "reciprocal" else 240.0)).clamp(min=1e-6)
        if kind == "divide":
            wide = wide / by
        else:
            wide = wide * (by if kind == "multiply" else by.reciprocal())
        numbers = wide.clamp(-largest, largest).to(torch.float8_e4m3fn).to(torch.float32)
        return (numbers / by if kind == "multiply" else numbers * by).to(x.dtype)

    def write(self, i: int) -> Tensor:
        """A mutation. The value stands in the list a second time."""
        return self.values[i].add_(1)

    def write_part(self, i: int, dim: int) -> Tensor:
        return self.values[i].select(dim, 0).mul_(2)


def interpreted(program: Random, groups: list[str]) -> Any:
    """The program as a function of its inputs."""

    def run(*inputs: Tensor) -> list[Tensor]:
        own_factor = 2 ** torch.distributed.get_rank() if program.own_numbers else 1
        machine = Machine(program.world, list(inputs), groups, own_factor)
        for step in program.steps:
            machine.run(step)
        return [machine.values[i] for i in program.outputs]

    return run
