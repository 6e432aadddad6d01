"""A record has what its op's schema has: torch passes arguments by position and by name, and leaves out defaults."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from weft.fused_ops.dispatch.launch_cache import key_of
from weft.fused_ops.library.communicating import OF_REGISTERED
from weft.fused_ops.ops import OPS, Op
from weft.fused_ops.ops.op import LOCAL_OPS, tensors_given


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


OF_TYPES = {"str": ("sum", "avg"), "bool": (True, False), "float": (0.5, 0.25), "int": (1, 2)}


def example(argument: Any, *, other: bool = False) -> Any:
    """An argument; or another one of its type."""
    of = str(argument.type)
    if "Tensor" in of:
        one: Any = torch.empty(3 if other else 2)
    elif "dtype" in argument.name:
        one = torch.float16 if other else torch.float32
    else:
        one = next(values for name, values in OF_TYPES.items() if name in of)[other]
    return [example_of(one), one] if "List" in of else one


def example_of(one: Any) -> Any:
    """One like it."""
    return one.clone() if isinstance(one, torch.Tensor) else one


@pytest.mark.parametrize("op", [op for op in OPS if op.known_by is not None], ids=lambda op: op.name)
def test_a_call_is_known_by_all_that_it_is_given(op: Op) -> None:
    """But for what graphs say, and the group, by whose name it is looked for."""
    arguments = [a for a in op.overload._schema.arguments if not a.name.startswith("group_")]

    def key(given: dict[str, Any]) -> Any:
        known = op.known_by and op.known_by(op.record(group_name="0", **given))
        return known and key_of(op.name, *known)

    given = {a.name: example(a) for a in arguments}
    for a in arguments:
        if a.name.startswith("result_scale"):  # such calls are not remembered
            assert key(given) is None
            given[a.name] = [None, None] if isinstance(given[a.name], list) else None
    usual = key(given)
    assert usual is not None and usual == key(dict(given))
    for a in arguments:
        if not a.name.startswith("result_scale"):
            assert key({**given, a.name: example(a, other=True)}) != usual, a.name
    # Tensors of equal sizes that may be missing are told from each other.
    optional = [a.name for a in arguments if str(a.type) == "Optional[Tensor]" and given[a.name] is not None]
    forms = [
        dict(zip(optional, there, strict=True)) for there in product([False, True], repeat=len(optional))
    ]
    keys = [
        key({**given, **{name: None for name, is_there in form.items() if not is_there}}) for form in forms
    ]
    assert len({*keys}) == len(forms)
