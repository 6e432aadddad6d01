"""What is told torch.library of every op that communicates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload

from . import compiled, schema
from .unsupported import refuse_unsupported


def implement(op: OpOverload, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """``run`` on CPU and CUDA, ``fake`` where only shapes are asked for."""
    torch.library.register_fake(op, compiled.known_to_inductor(fake), lib=schema.lib)
    compiled.declare_communicating(op)
    for key in ("CPU", "CUDA"):
        schema.lib.impl(op, run, key)
    refuse_unsupported(schema.lib, op._schema.name.split("::")[1])
