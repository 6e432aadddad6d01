"""Ops in ``torch.ops.weft`` that send nothing: no rank waits for another one's call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..gradients import AUTOCAST
from ..op import on_device

_lib = torch.library.Library("weft", "FRAGMENT")
#: By their names: what makes a call of which a gradient is wanted.
LOCAL_OPS: dict[str, Callable[..., Any] | None] = {}


def define(
    schema: str,
    validate: Callable[..., None],
    run: Callable[..., Any],
    fake: Callable[..., Any],
    with_gradient: Callable[..., Any] | None = None,
) -> None:
    """Of an op: what it refuses, given its arguments in order; its results, with data, without, and where a gradient is
    wanted."""
    name = schema.partition("(")[0]

    def run_checked(*args: Any) -> Any:
        validate(*args)
        with on_device(args[0]), torch._C._ExcludeDispatchKeyGuard(AUTOCAST):
            return run(*args)

    def fake_checked(*args: Any) -> Any:
        validate(*args)
        return fake(*args)

    LOCAL_OPS[name] = with_gradient
    _lib.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
    _lib.impl(name, run_checked, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft::{name}", fake_checked, lib=_lib)
