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
        def __init__(
            self,
            params: Any,
            bucket_indices: Any,
            per_bucket_size_limits: Any,
            process_group: Any,
            *args: Any,
            **named: Any,
        ) -> None:
            if isinstance(process_group, WeftProcessGroup):
                process_group = process_group.inner
            super().__init__(params, bucket_indices, per_bucket_size_limits, process_group, *args, **named)

    dist.Reducer = Reducer  # type: ignore[misc]
