"""Operands as kernels take them: where the caller's tensors do not lie so, they are copied, but not before it is clear
that a kernel runs.

Another algorithm would do without the copy, but how a tensor lies is each rank's own affair: the peers' may lie better,
and all ranks must run the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, empty_like

from ...kernels.device.gemm.operands import ALIGNMENT, rows_lie_well, start_of


def rows_of(x: Tensor) -> Tensor:
    """[..., K] as [m, K]: a view.

    Raises:
        RuntimeError: there is none.
    """
    return x.view(x.shape[:-1].numel(), x.shape[-1])


def in_rows(x: Tensor) -> bool:
    """Whether kernels can describe x: its rows are contiguous, and lie at distances that they take."""
    return x.is_contiguous() or (x.stride(-1) == 1 and rows_lie_well(x))


def in_rows_or_columns(B: Tensor) -> bool:
    """Whether kernels can describe a right operand: likewise, or its columns do."""
    return in_rows(B) or in_rows(B.t())


def aligned(x: Tensor) -> Tensor:
    """x at an address that kernels can take. A copy, never another algorithm: the peers' x may lie better."""
    return x if start_of(x) % ALIGNMENT == 0 else x.clone()


class Staging:
    """The operands of one call."""

    def __init__(self) -> None:
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._why: list[str] = []

    def take(
        self,
        name: str,
        x: Tensor,
        shaped: Callable[[Tensor], Tensor] = lambda x: x,
        fits: Callable[[Tensor], bool] = in_rows,
    ) -> Tensor:
        """``shaped(x)`` at an address that kernels can take: a view of x, or memory for a copy of it, which is empty
        until ``copy``. Its sizes and strides are those that a kernel gets.

        Args:
            name: for ``reason``.
            shaped: makes a view. It raises RuntimeError where there is none, but never of what is contiguous.
            fits: whether kernels take a view with such strides. What is contiguous fits.
        """
        try:
            seen = shaped(x)
            viewed = fits(seen)
        except RuntimeError:
            viewed = False
        if not viewed:
            memory = x.new_empty(x.shape)
            self._why.append(f"{name} does not lie in rows")
        elif (offset := start_of(seen) % ALIGNMENT) != 0:
            memory = empty_like(x)
            self._why.append(f"{name} begins {offset} bytes after a multiple of {ALIGNMENT}")
        else:
            return seen
        self._copies.append((memory, x))
        return shaped(memory)

    def copy(self) -> None:
        """Fill what was taken. To be called once: on the stream of the kernel, before it."""
        for memory, x in self._copies:
            memory.copy_(x)

    @property
    def reason(self) -> str:
        """For the plan: what each call like this one copies, and why. "" if nothing."""
        return f"each call copies operands: {', '.join(self._why)}" if self._why else ""
