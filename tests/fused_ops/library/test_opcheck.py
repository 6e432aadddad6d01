"""torch's own checks of every op: its schema, its fake, its gradient, and both as they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from op_table import op_calls
from opcommon import DEVICES, world
from ranks import run_row
from torch import Tensor
from torch.utils._pytree import tree_map_only

OPS = [name for name, call in op_calls().items() if call.of_torch("") is not None and "scaled" not in name]


def lies_by_columns(x: Tensor) -> Tensor:
    return x.mT.contiguous().mT if x.dim() > 1 else x


def opcheck(rank: int, world_size: int, name: str) -> None:
    """With and without a gradient, in rows and in columns, and without what may be left out."""
    call = op_calls(world_size)[name]
    op, given = call.of_torch(world().group_name) or (None, {})
    least = {
        a.name: None if isinstance(a.type, torch.OptionalType) else given[a.name]
        for a in op._schema.arguments
        if not a.has_default_value()
    }
    if name == "moe_dispatch":
        least["capacity"] = given["capacity"]  # rows that are left over hold anything
    for wanted, named in ((False, given), (True, given), (True, least)):
        if wanted and named is given and not call.has_gradient:
            continue

        def made(x: Tensor, wanted: bool = wanted) -> Any:
            return lies_by_columns(x.detach()).requires_grad_(
                wanted and call.has_gradient and x.is_floating_point()
            )

        # All are traced once without gradients by test_modes.py.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
        torch.library.opcheck(op, (), tree_map_only(Tensor, made, named), test_utils=checks[: 3 + wanted])


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_of_every_op(device: str, name: str) -> None:
    run_row(opcheck, 2, name, device=device)
