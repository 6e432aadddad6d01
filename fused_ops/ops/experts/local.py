"""Ops in ``torch.ops.weft`` that send nothing: no rank waits for another one's call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ...dispatch.plan import on

_lib = torch.library.Library("weft", "FRAGMENT")
#: Their names.
LOCAL_OPS: list[str] = []


def on_device(x: Tensor) -> AbstractContextManager[object]:
    return on(x.device) if x.device.type == "cuda" else nullcontext()


def define(
    schema: str,
    validate: Callable[..., None],
    run: Callable[..., Any],
    fake: Callable[..., Any],
    with_gradient: Callable[..., Any] | None = None,
) -> None:
    """Of an op: what it refuses, given its arguments in order; its results, with data and without, and where a gradient
    may be wanted."""
    name = schema.partition("(")[0]

    def run_checked(*args: Any) -> Any:
        validate(*args)
        with on_device(args[0]):
            return run(*args)

    def fake_checked(*args: Any) -> Any:
        validate(*args)
        return fake(*args)

    LOCAL_OPS.append(name)
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _lib.impl(name, run_checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake_checked, lib=_lib)
    if with_gradient is not None:
        _lib.impl(name, with_gradient, "Autograd")
