"""Logits of a chunk of rows, one chunk after the other in one buffer, and the gradients that are made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from ....kernels.linear_cross_entropy.reference import (
    Columns,
    Loss,
    Scores,
    losses_and_terms,
    reference_gradient,
    reference_statistics,
)
from ..op import on_device

#: Of a chunk: a constant, so that all ranks cut alike, whatever they have of the vocabulary. Its products fill a GPU.
ROWS = 2048


def chunks_of(rows: int) -> list[slice]:
    """At least one, so that ranks meet also over no rows."""
    return [slice(first, min(first + ROWS, rows)) for first in range(0, max(rows, 1), ROWS)]


def with_rows(logits: Tensor) -> Tensor:
    """[M, V], each row contiguous: kernels read them so."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def statistics(logits: Tensor, columns: Columns) -> Tensor:
    if logits.device.type == "cpu":
        return reference_statistics(logits, columns)
    from ....kernels.linear_cross_entropy import triton_kernel

    return triton_kernel.launch_statistics(logits, columns)


def row_losses(gathered: Tensor, targets: Tensor, loss: Loss, count: Tensor | None) -> tuple[Tensor, Tensor]:
    if gathered.device.type == "cpu":
        return losses_and_terms(gathered, targets, loss, count)
    from ....kernels.linear_cross_entropy import triton_kernel

    return triton_kernel.launch_losses(gathered, targets, loss, count)


def gradient(logits: Tensor, columns: Columns, terms: Tensor, out: Tensor) -> None:
    if logits.device.type == "cpu":
        reference_gradient(logits, columns, terms, out)
        return
    from ....kernels.linear_cross_entropy import triton_kernel

    triton_kernel.launch_gradient(logits, columns, terms, out)


def multiply_(gradient: Tensor, factor: Tensor) -> Tensor:
    """By a number in float32: of 16 bits, torch would round that before."""
    if gradient.device.type == "cpu":
        return gradient if factor.item() == 1 else gradient.copy_(gradient.float() * factor)
    from ....kernels.linear_cross_entropy import triton_kernel

    with on_device(gradient):
        triton_kernel.launch_multiply(gradient, factor)
    return gradient


def logits_by_chunks(x: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """Rows of x [M, H], and their logits, which the next chunk overwrites.

    The call itself launches the first product, so that it hides what the host prepares for what follows.
    """
    chunks = chunks_of(x.shape[0])
    buffer = x.new_empty(chunks[0].stop, weight.shape[0])

    def logits(rows: slice) -> tuple[slice, Tensor]:
        part = x[rows]
        out = buffer[: part.shape[0]]
        if bias is None:
            torch.mm(part, weight.t(), out=out)
        else:
            torch.addmm(bias, part, weight.t(), out=out)
        return rows, out

    return chain([logits(chunks[0])], map(logits, chunks[1:]))


class Gradients:
    """Those of x [..., H], weight and bias that are wanted, of gradients of logits that come chunk by chunk."""

    def __init__(self, x: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        self._rows, self._weight = x.flatten(0, -2), weight
        of_x, of_weight, of_bias = wanted
        self._of_x = x.new_empty(x.shape) if of_x else None
        self._of_weight = torch.empty_like(weight) if of_weight else None
        self._of_bias = None
        if of_bias and bias is not None:
            self._of_bias = torch.zeros_like(bias, dtype=torch.float32)

    def add(self, rows: slice, gradient: Tensor) -> None:
        if self._of_x is not None:
            torch.mm(gradient, self._weight, out=self._of_x.view(self._rows.shape)[rows])
        if self._of_weight is not None:
            part = self._rows[rows]
            if rows.start == 0:
                torch.mm(gradient.t(), part, out=self._of_weight)
            else:
                self._of_weight.addmm_(gradient.t(), part)
        if self._of_bias is not None:
            self._of_bias += gradient.sum(0, dtype=torch.float32)

    def found(self) -> list[Tensor]:
        of_bias = None if self._of_bias is None else self._of_bias.to(self._rows.dtype)
        return [g for g in (self._of_x, self._of_weight, of_bias) if g is not None]


class GradientsCall(NamedTuple):
    """Of the gradients of what was computed in chunks, by ``gradient_terms``. Without a weight x are the logits."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    targets: Tensor
    bounds: Tensor
    terms: Tensor
    extra: str
    softcap: float | None
    temperature: float
    wanted: Sequence[bool]


def _run(call: GradientsCall) -> list[Tensor]:
    """This rank's; nothing is sent."""
    columns = Columns(
        call.targets.reshape(-1), call.bounds[:1], Scores(call.softcap, call.temperature), call.extra
    )
    x, weight, terms = call.x.flatten(0, -2), call.weight, call.terms
    with on_device(x):
        if weight is None:
            logits = with_rows(x)
            out = torch.empty_like(logits, memory_format=torch.contiguous_format)
            gradient(logits, columns, terms, out)
            return [out.view(call.x.shape)]
        found = Gradients(call.x, weight, call.bias, call.wanted)
        for rows, logits in logits_by_chunks(x, weight, call.bias):
            gradient(logits, columns.rows(rows), terms[:, rows].contiguous(), logits)
            found.add(rows, logits)
        return found.found()


def fake_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: Sequence[bool]
) -> list[Tensor]:
    of_x, of_weight, of_bias = wanted
    found = [x.new_empty(x.shape)] if of_x else []
    if weight is not None and of_weight:
        found.append(torch.empty_like(weight))
    if bias is not None and of_bias:
        found.append(bias.new_empty(bias.shape))
    return found


_lib = torch.library.Library("weft", "FRAGMENT")
_lib.define(
    "linear_cross_entropy_gradients(Tensor x, Tensor? weight, Tensor? bias, Tensor targets, Tensor bounds,"
    " Tensor terms, str extra, float? softcap, float temperature, bool[] wanted) -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
_lib.impl(
    "linear_cross_entropy_gradients", lambda *args: _run(GradientsCall(*args)), "CompositeExplicitAutograd"
)
torch.library.register_fake(
    "weft::linear_cross_entropy_gradients",
    lambda *args: fake_gradients(args[0], args[1], args[2], args[-1]),
    lib=_lib,
)
