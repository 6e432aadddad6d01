"""DistributedDataParallel's buckets go to the group's own backend.

Its C++ code calls the group in the midst of the backward pass, and code in Python takes the host longer there than
weft's all-reduce gains on GPUs, which hide it behind the backward pass in any case (bench/NOTES.md).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch.distributed as dist

from .group import WeftProcessGroup


@cache
def see_reducer() -> None:
    """From now on."""

    class Reducer(dist.Reducer):
        def __init__(self, *args: Any, **named: Any) -> None:
            inner = {name: _inner_of(value) for name, value in named.items()}
            super().__init__(*map(_inner_of, args), **inner)

        def _update_process_group(self, new_process_group: Any) -> None:
            # Ranks that make their DDP anew, as these others join, send the same buckets.
            super()._update_process_group(_inner_of(new_process_group))

    dist.Reducer = Reducer  # type: ignore[misc]


def _inner_of(group: Any) -> Any:
    """Of a group with weft; anything else as it is."""
    return group.inner if isinstance(group, WeftProcessGroup) else group
