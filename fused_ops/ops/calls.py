"""A call of each op as a record: its arguments in the schema's order. Validation returns it with what it derives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ...kernels.all_reduce_rms_norm.quant import QuantKind
from ...kernels.all_reduce_rms_norm.reference import Affine, NormKind


class OpArguments(Protocol):
    """What the records have in common. They are tuples, which are made in a fourth of a frozen dataclass's time."""

    @property
    def _fields(self) -> tuple[str, ...]: ...
    @property
    def group_name(self) -> str: ...
    @property
    def group_size(self) -> int | None: ...
    @property
    def tensors(self) -> list[Tensor]:
        """All that are given."""


class AllGatherMatmulCall(NamedTuple):
    A_shard: Tensor
    Bs: list[Tensor]
    gather_dim: int
    group_name: str
    return_A: bool = True
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.A_shard, *self.Bs]


class MatmulReduceScatterCall(NamedTuple):
    A: Tensor
    B: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    out_dtype: torch.dtype | None = None
    bias: Tensor | None = None
    residual: Tensor | None = None
    more: Sequence[Tensor] | None = None
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.A, self.B, *self.terms, *(self.more or ())]

    @property
    def factors(self) -> list[Tensor]:
        """A and B, and those of the further products that are added."""
        return [self.A, self.B, *(self.more or ())]

    @property
    def stacked(self) -> MatmulReduceScatterCall:
        """The same of one product, of the factors side by side."""
        if not self.more:
            return self
        As, Bs = self.factors[::2], self.factors[1::2]
        return self._replace(A=torch.cat(As, -1), B=torch.cat(Bs), more=None)

    @property
    def terms(self) -> list[Tensor]:
        """What is added to the local part of the sum."""
        return [term for term in (self.bias, self.residual) if term is not None]

    def local_shape(self, world_size: int) -> list[int]:
        """That of the local part; ``scatter_dim`` is not negative."""
        shape = [*self.A.shape[:-1], self.B.shape[1]]
        shape[self.scatter_dim] = shape[self.scatter_dim] // world_size
        return shape


class AllReduceCall(NamedTuple):
    """Also of an all-reduce in place."""

    x: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x]


class AllGatherCall(NamedTuple):
    x: Tensor
    gather_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x]

    def whole_shape(self, world_size: int) -> list[int]:
        """That of the result; ``gather_dim`` is not negative."""
        shape = list(self.x.shape)
        shape[self.gather_dim] = shape[self.gather_dim] * world_size
        return shape


class AllGatherOutCall(NamedTuple):
    out: Tensor
    x: Tensor
    gather_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out, self.x]

    @property
    def without_out(self) -> AllGatherCall:
        return AllGatherCall(*self[1:])


class ReduceScatterCall(NamedTuple):
    x: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.x]

    def part_shape(self, world_size: int) -> list[int]:
        """That of the result; ``scatter_dim`` is not negative."""
        shape = list(self.x.shape)
        shape[self.scatter_dim] = shape[self.scatter_dim] // world_size
        return shape


class ReduceScatterOutCall(NamedTuple):
    out: Tensor
    x: Tensor
    reduce_op: str
    scatter_dim: int
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.out, self.x]

    @property
    def without_out(self) -> ReduceScatterCall:
        return ReduceScatterCall(*self[1:])


class AllReduceRmsNormCall(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    group_name: str
    weight_offset: float = 0.0
    round_sum: bool = True
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, self.weight) if t is not None]

    @property
    def affine(self) -> Affine:
        return Affine(self.weight)

    @property
    def kind(self) -> NormKind:
        wide = self.weight.dtype != self.x.dtype
        return NormKind(self.eps, self.weight_offset, self.round_sum, self.residual is not None, wide)


class AllReduceRmsNormQuantCall(NamedTuple):
    """``out_dtype`` and ``smallest`` are there behind validation, but for the latter beside a scale."""

    x: Tensor
    residual: Tensor | None
    weight: Tensor
    eps: float
    group_name: str
    scale: Tensor | None = None
    out_dtype: torch.dtype | None = None
    scale_op: str = "reciprocal"
    smallest: float | None = None
    weight_offset: float = 0.0
    round_sum: bool = True
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, self.weight, self.scale) if t is not None]

    @property
    def affine(self) -> Affine:
        return Affine(self.weight)

    @property
    def norm(self) -> AllReduceRmsNormCall:
        """The call without what makes fp8 of the norm."""
        named = self.weight_offset, self.round_sum, self.group_size
        return AllReduceRmsNormCall(*self[:5], *named)

    @property
    def quant(self) -> QuantKind:
        assert self.out_dtype is not None, "validation has entered it"
        return QuantKind(self.out_dtype, self.scale_op, self.smallest)

    @property
    def kind(self) -> NormKind:
        return self.norm.kind._replace(quant=self.quant)


class AllReduceLayerNormCall(NamedTuple):
    x: Tensor
    residual: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    eps: float
    group_name: str
    weight_offset: float = 0.0
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in (self.x, self.residual, *self.affine) if t is not None]

    @property
    def affine(self) -> Affine:
        return Affine(self.weight, self.bias)

    @property
    def kind(self) -> NormKind:
        residual, weight, bias = (t is not None for t in (self.residual, *self.affine))
        wide = any(t is not None and t.dtype != self.x.dtype for t in self.affine)
        return NormKind(self.eps, self.weight_offset, True, residual, wide, True, weight, bias)


class MatmulAllReduceCall(NamedTuple):
    A: Tensor
    B: Tensor
    reduce_op: str
    group_name: str
    group_size: int | None = None

    @property
    def tensors(self) -> list[Tensor]:
        return [self.A, self.B]
