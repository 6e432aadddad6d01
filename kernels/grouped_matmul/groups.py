"""Which rows a grouped product multiplies by which expert."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Groups(NamedTuple):
    """Rows of experts: of each of them ``parts`` groups, one after the other.

    ``ends``: [E * parts] int32, contiguous. ``begins``: likewise; None: each begins where the one before ends.
    """

    ends: Tensor
    begins: Tensor | None = None
    parts: int = 1
