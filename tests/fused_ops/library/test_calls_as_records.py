"""A record has what its op's schema has: torch passes arguments by position and by name, and leaves out defaults."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from weft.fused_ops.library.communicating import OF_REGISTERED
from weft.fused_ops.ops import OPS, Op
from weft.fused_ops.ops.experts.local import LOCAL_OPS
from weft.fused_ops.ops.op import tensors_given


def test_every_op_is_here() -> None:
    known = {
        name.removeprefix("weft::") for name in torch._C._dispatch_get_all_op_names() if "weft::" in name
    }
    of_the_pass = {"agree", "keep_order", "record"}
    of_the_pass |= {f"all_gather_{end}" for end in ("start", "wait", "release")}
    of_the_pass |= {f"reduce_scatter_{end}" for end in ("start", "wait")}
    of_handles = {
        op._schema.name.removeprefix("weft::") for op in OF_REGISTERED
    }  # calls of what register gives
    assert {op.name for op in OPS} == known - of_the_pass - of_handles - LOCAL_OPS.keys()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_fields_are_the_schemas_arguments(op: Op) -> None:
    record: Any = op.record
    arguments = op.overload._schema.arguments
    assert record._fields == tuple(a.name for a in arguments)
    assert record._field_defaults == {a.name: a.default_value for a in arguments if a.has_default_value()}


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_tensors_are_all_of_the_schemas(op: Op) -> None:
    """Of the optional ones those that are given."""
    given: dict[str, Any] = {}
    for a in op.overload._schema.arguments:
        if "Tensor" in str(a.type):
            given[a.name] = [torch.empty(1), torch.empty(2)] if "List" in str(a.type) else torch.empty(1)
        else:
            given[a.name] = None
    flat = [t for value in given.values() for t in (value if isinstance(value, list) else [value])]
    expected = [t for t in flat if t is not None]
    assert [id(t) for t in tensors_given(op.record(**given))] == [id(t) for t in expected]
