"""Operands as kernels take them: where the caller's tensors do not lie so, they are copied, but not before it is clear
that a kernel runs.

Another algorithm would do without the copy, but how a tensor lies is each rank's own affair: the peers' may lie better,
and all ranks must run the same.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, empty_like

from .planning import address_of

_ALIGNMENT = 16  # bytes


def rows_of(x: Tensor) -> Tensor:
    """[..., K] as [m, K]: a view.

    Raises:
        RuntimeError: there is none.
    """
    return x.view(x.shape[:-1].numel(), x.shape[-1])


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
        fits: Callable[[Tensor], bool] = lambda x: True,
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
        elif (behind := address_of(seen) % _ALIGNMENT) != 0:
            memory = empty_like(x)
            self._why.append(f"{name} begins {behind} bytes behind a multiple of {_ALIGNMENT}")
        else:
            return seen
        self._copies.append((memory, x))
        return shaped(memory)

    def copy(self) -> None:
        """Fill what was taken. To be called once: on the stream of the kernel, in front of it."""
        for memory, x in self._copies:
            memory.copy_(x)

    @property
    def reason(self) -> str:
        """For the plan: what each call like this one copies, and why. "" if nothing."""
        return f"each call copies operands: {', '.join(self._why)}" if self._why else ""
