"""Experts' outputs that kernels put together while they load them: the host's side of combine.cuh, and the same in
plain torch."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..comm.exchange_launcher import ExchangeLauncher
from ..comm.ll_exchange import VECTOR
from ..jit.program import Function, fields
from .rounds import CollectiveLaunch

MOST_VECTORS = 1 << 31  #: of all tokens: kernels count them in 32 bits, rounded up to a pass of all blocks


class CombineSource(ctypes.Structure):
    """The twin of ``weft::Combine`` in combine.cuh."""

    _fields_ = (
        *fields(ctypes.c_uint64, "y slots weights shared"),
        *fields(ctypes.c_uint32, "rows tokens first vectors"),
    )


# From y to shared, at once: a store to a ctypes field costs as much.
_put_addresses = struct.Struct("4Q").pack_into


class CombineShape(NamedTuple):
    """Of what is put together: rows of y, choices of each token, whether their weights are float32 beside 16 bits, and
    whether there is a shared expert's part."""

    rows: int
    choices: int
    wide: bool
    shared: bool

    @property
    def defines(self) -> dict[str, str | int]:
        """What combine.cuh must know."""
        return {"CHOICES": self.choices, "WIDE_CHOICES": int(self.wide), "SHARED_EXPERT": int(self.shared)}

    def source(self, tokens: int, vectors: int, first: int = 0) -> CombineSource:
        """Without addresses."""
        return CombineSource(rows=self.rows, tokens=tokens, first=first, vectors=vectors)


class CombinedSum(NamedTuple):
    """What is put together and then reduced: rows [tokens, hidden]."""

    tokens: int
    hidden: int
    dtype: torch.dtype
    shape: CombineShape
    reduce_op: str = "sum"

    @property
    def vectors(self) -> int:
        """Of a row."""
        return self.hidden * self.dtype.itemsize // VECTOR

    @property
    def defined(self) -> tuple[torch.dtype, str, tuple[int, bool, bool]]:
        """What a program is made for."""
        return self.dtype, self.reduce_op, self.shape[1:]

    @property
    def source(self) -> CombineSource:
        return self.shape.source(self.tokens, self.vectors)


def choice_defines(choices: tuple[int, bool, bool] | None) -> dict[str, str | int]:
    """Those of a CombineShape, after its rows; None of a kernel that puts nothing together."""
    return {} if choices is None else CombineShape(0, *choices).defines


class Combined(NamedTuple):
    """y [R, H], slots [T, k], weights [T, k], and perhaps shared [T, H]."""

    y: torch.Tensor
    slots: torch.Tensor
    weights: torch.Tensor
    shared: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        """In the kernels' order."""
        return [t for t in self if t is not None]

    @property
    def result_shape(self) -> tuple[int, int]:
        return self.slots.shape[0], self.y.shape[1]

    @property
    def shape(self) -> CombineShape:
        rows, choices = self.y.shape[0], self.slots.shape[1]
        return CombineShape(rows, choices, self.weights.dtype != self.y.dtype, self.shared is not None)

    def choices(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """For each choice, rows of y, and which of them the slots say; where they do not, row 0 stands."""
        found = []
        for slot in self.slots.unbind(1):
            there = (slot >= 0) & (slot < self.y.shape[0])
            found.append((torch.where(there, slot, 0).long(), there))
        return found

    def total(self) -> torch.Tensor:
        """This rank's rows [T, H], as the kernels compute them: in float32, rounded once. Of float64, in that."""
        y, wide = self.y, torch.promote_types(self.y.dtype, torch.float32)
        total = y.new_zeros(self.result_shape, dtype=wide)
        if y.shape[0]:
            for (row, there), weight in zip(self.choices(), self.weights.unbind(1), strict=True):
                total += torch.where(there[:, None], y[row].to(wide) * weight[:, None].to(wide), 0)
        if self.shared is not None:
            total += self.shared
        return total.to(y.dtype)

    def gradients(
        self, grad: torch.Tensor, wanted: Sequence[bool]
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Those of y, weights and shared that are wanted, of the gradient of ``total``; in float32, rounded once."""
        (of_y, of_weights, of_shared), y = wanted, self.y
        for_y = y.new_zeros(y.shape[0] + 1, y.shape[1]) if of_y else None  # the last row is of no slot
        for_weights = []
        for (row, there), weight in zip(self.choices(), self.weights.unbind(1), strict=True):
            if for_y is not None:
                part = (grad * weight[:, None].float()).to(y.dtype)
                for_y.index_add_(0, torch.where(there, row, y.shape[0]), part)
            if of_weights and y.shape[0]:
                dots = (y[row].float() * grad).sum(-1)
                for_weights.append(torch.where(there, dots, 0))
        found = None
        if of_weights:
            found = torch.stack(for_weights, 1) if for_weights else torch.zeros_like(self.weights)
            found = found.to(self.weights.dtype)
        return (None if for_y is None else for_y[:-1]), found, grad if of_shared else None


def why_not_combined(tokens: int, hidden: int, dtype: torch.dtype) -> str | None:
    """Why kernels cannot put so many rows of ``hidden`` elements together; None if they can."""
    if hidden * dtype.itemsize % VECTOR:
        return f"rows of {hidden} x {dtype} are no multiple of {VECTOR} bytes"
    if tokens * hidden * dtype.itemsize >= MOST_VECTORS * VECTOR:
        return f"{tokens} rows of {hidden} x {dtype} are more than {MOST_VECTORS} times {VECTOR} bytes"
    return None


class CombineLauncher(ExchangeLauncher[Any]):
    """A collective of what is put together: of y, slots, weights and, if there is one, shared.

    Addresses are those of contiguous tensors, multiples of 16.

    Args:
        params: of the kernel, with a field ``combine``.
        result: where in it the result's address stands.
        function, launch: the kernel, loaded, and its grid.
    """

    def __init__(self, params: Any, result: int, function: Function, launch: CollectiveLaunch) -> None:
        super().__init__()
        self.grids, self._result = (launch.blocks,) * launch.epochs, result
        self._prepare(function, launch.blocks, launch.threads, params)
        self._combine = type(params).combine.offset

    def _put(self, operands: Sequence[int], results: Sequence[int]) -> Callable[[int], None]:
        put_operands(self._params[0], self._combine, operands)
        struct.pack_into("Q", self._params[0], self._result, results[0])
        return self._launches[0]


def put_operands(params: ctypes.Structure, at: int, operands: Sequence[int]) -> None:
    """The addresses of y, slots, weights and perhaps shared into the source that begins ``at`` so many bytes."""
    _put_addresses(params, at, *operands, *(0,) * (4 - len(operands)))
