"""Logits of a chunk of rows, one chunk after the other in the same memory, and the gradients that are made of them.

They are made as [V, rows], transposed: those of up to H rows take no more memory than the gradient of the weight,
[V, H], and the first chunk lies in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, pairwise
from typing import Any

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
from ..op import define, on_device, record_of

#: Of a chunk, at least: not by what a rank has of the vocabulary, as all must cut alike. Its products fill a GPU.
ROWS = 2048
#: Of a block of the weight's gradient, where it is made in the place of logits.
COLUMNS = 8192
_PITCH = 64  # elements: whole lines of memory
_LOAD = 8  # elements: matmuls and kernels load 16 bytes at a time


def chunks_of(rows: int, hidden: int = 0) -> list[slice]:
    """At least one, so that ranks meet also over no rows.

    Args:
        hidden: columns of the weight, if its gradient is made. With as many rows a chunk's logits are as large as that
            gradient, which each chunk but the first one reads and adds to.
    """
    size = max(ROWS, hidden)
    return [slice(*ends) for ends in pairwise([0, *range(size, rows, size), rows])]


def with_rows(logits: Tensor) -> Tensor:
    """[M, V], each row contiguous: kernels read them so."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def statistics(blocks: Sequence[Tensor], columns: Columns) -> Tensor:
    """Of logits whose blocks of columns follow each other."""
    if blocks[0].device.type == "cpu":
        return reference_statistics(torch.cat([*blocks], 1), columns)
    from ....kernels.linear_cross_entropy import triton_kernel

    return triton_kernel.launch_statistics(blocks, columns)


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


def gradient_(blocks: Sequence[Tensor], columns: Columns, terms: Tensor) -> None:
    """In place of the logits, whose blocks of columns follow each other."""
    for own, logits in _numbered(blocks):
        gradient(logits, columns._replace(first=own.start), terms, logits)


def multiplied(gradient: Tensor, factor: Tensor) -> Tensor:
    """By a number in float32: of 16 bits, torch would round that before. Zeros stay, as those of ignored rows must."""
    return (gradient.float() * factor).where(gradient != 0, 0).to(gradient.dtype)


def multiply_(gradient: Tensor, factor: Tensor) -> Tensor:
    """``multiplied``, in place."""
    if gradient.device.type == "cpu":
        return gradient if factor.item() == 1 else gradient.copy_(multiplied(gradient, factor))
    from ....kernels.linear_cross_entropy import triton_kernel

    with on_device(gradient):
        triton_kernel.launch_multiply(gradient, factor)
    return gradient


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
        self.chunks = chunks_of(self._rows.shape[0], weight.shape[1] if of_weight else 0)
        self._buffer = x.new_empty(0)
        self._blocks: list[int] = []  # of columns, in which the weight's gradient is made

    def places(self, rows: slice) -> list[Tensor]:
        """For logits [rows, V], blocks of columns that follow each other, in the memory of the last chunk's.

        The first chunk's lie at the end of the weight's gradient, and the last COLUMNS in a buffer: that gradient is
        made in blocks, each of which overwrites only such logits as blocks before were made of.
        """
        count, (columns, hidden) = rows.stop - rows.start, self._weight.shape
        of_weight = self._of_weight if rows.start == 0 and count <= hidden else None
        if of_weight is not None and not of_weight.is_contiguous():
            of_weight = None
        own = columns if of_weight is None else min(columns, COLUMNS)
        pitch = -(-count // _PITCH) * _PITCH
        if self._buffer.numel() < own * pitch:
            self._buffer = self._buffer.new_empty(own * pitch)
        last = self._buffer[: own * pitch].view(own, pitch)[:, :count].t()
        self._blocks = [own]
        if of_weight is None or own == columns:
            return [last]
        pitch, within = min(pitch, hidden), columns - own
        begin = (columns * hidden - within * pitch) // _LOAD * _LOAD
        done = 0
        while done < within:
            end = min((begin + done * pitch) // hidden, within)
            self._blocks.insert(-1, end - done)
            done = end
        logits = of_weight.view(-1)[begin : begin + within * pitch].view(within, pitch)
        return [logits[:, :count].t(), last]

    def add(self, rows: slice, blocks: Sequence[Tensor]) -> None:
        part = self._rows[rows]
        if self._of_x is not None:
            out = self._of_x.view(self._rows.shape)[rows]
            for columns, gradient in _numbered(blocks):
                if columns.start:
                    out.addmm_(gradient, self._weight[columns])
                else:
                    torch.mm(gradient, self._weight[columns], out=out)
        if self._of_bias is not None:
            self._of_bias += torch.cat([gradient.sum(0, dtype=torch.float32) for gradient in blocks])
        if self._of_weight is not None:
            *within, last = blocks
            parts = (block.split(self._blocks[:-1], 1) for block in within)
            for columns, gradient in _numbered(chain(*parts, [last])):
                out = self._of_weight[columns]
                if rows.start:
                    out.addmm_(gradient.t(), part)
                else:
                    torch.mm(gradient.t(), part, out=out)

    def found(self) -> list[Tensor]:
        of_bias = None if self._of_bias is None else self._of_bias.to(self._rows.dtype)
        return [g for g in (self._of_x, self._of_weight, of_bias) if g is not None]


def logits_by_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, gradients: Gradients
) -> Iterator[tuple[slice, list[Tensor]]]:
    """Rows of x [M, H], and their logits in ``gradients.places``, which the next chunk overwrites.

    The call itself launches the first product, so that it hides what the host prepares for what follows.
    """

    def logits(rows: slice) -> tuple[slice, list[Tensor]]:
        part, blocks = x[rows].t(), gradients.places(rows)
        for columns, out in _numbered(blocks):
            if bias is None:
                torch.mm(weight[columns], part, out=out.t())
            else:
                torch.addmm(bias[columns].unsqueeze(1), weight[columns], part, out=out.t())
        return rows, blocks

    return chain([logits(gradients.chunks[0])], map(logits, gradients.chunks[1:]))


def _numbered(blocks: Iterable[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Blocks of columns that follow each other, with their columns."""
    first = 0
    for block in blocks:
        yield slice(first, first + block.shape[1]), block
        first += block.shape[1]


_SCHEMA = (
    "linear_cross_entropy_gradients(Tensor x, Tensor? weight, Tensor? bias, Tensor targets, Tensor bounds,"
    " Tensor terms, str extra, float? softcap, float temperature, bool[] wanted) -> Tensor[]"
)
_record = record_of(_SCHEMA)


def _run(*args: Any) -> list[Tensor]:
    """This rank's gradients of what was computed in chunks; nothing is sent. ``terms``: of ``gradient_terms``. Without
    a weight x are the logits."""
    call = _record(*args)
    columns = Columns(
        call.targets.reshape(-1), call.bounds[:1], Scores(call.softcap, call.temperature), call.extra
    )
    x, weight, terms = call.x.flatten(0, -2), call.weight, call.terms
    if weight is None:
        logits = with_rows(x)
        out = torch.empty_like(logits, memory_format=torch.contiguous_format)
        gradient(logits, columns, terms, out)
        return [out.view(call.x.shape)]
    found = Gradients(call.x, weight, call.bias, call.wanted)
    for rows, blocks in logits_by_chunks(x, weight, call.bias, found):
        gradient_(blocks, columns.rows(rows), terms[:, rows].contiguous())
        found.add(rows, blocks)
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


define(
    _SCHEMA,
    lambda *_: None,
    _run,
    lambda *args: fake_gradients(args[0], args[1], args[2], args[-1]),
)
