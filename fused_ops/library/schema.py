"""The ops in ``torch.ops.weft``, with the argument order of ``torch.ops.symm_mem``: those of ``ops/`` by their schemas
there, and those of registered tensors and of collectives that are waited for later by their schemas here.

``schema.all_gather_matmul`` is ``torch.ops.weft.fused_all_gather_matmul.default``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload

from ..ops import OPS, Op

lib = torch.library.Library("weft", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# A start copies an operand that is not contiguous. Were strides asked for, Inductor would copy an expression once for
# each op that takes it, and not know that the start's copy is read until the wait.
_ANY_STRIDES = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

if TYPE_CHECKING:

    def __getattr__(name: str) -> OpOverload: ...


def python_name(op: Op) -> str:
    """What it is called here."""
    return op.name.removeprefix("fused_").removeprefix("one_shot_")


for _op in OPS:
    lib.define(_op.schema, tags=_TAGS)
    globals()[python_name(_op)] = _op.overload
_SIZE = "int? group_size=None"
_SIGNAL, _SIGNALS = "Tensor(a!) x, int peer, str group_name", "Tensor(a!)[] xs, int[] peers, str group_name"
# Of registered tensors. ``x`` is this rank's, by which the registration is found. All write to it, as far as a graph is
# concerned: so each keeps its place among the others and among what reads the tensor.
_OF_REGISTERED = (
    f"signal({_SIGNAL}, *, {_SIZE}) -> ()",
    f"wait({_SIGNAL}, *, {_SIZE}) -> ()",
    f"put(Tensor(a!) x, Tensor source, int peer, str group_name, *, {_SIZE}) -> ()",
    f"get(Tensor(a!) x, Tensor(b!) out, int peer, str group_name, *, {_SIZE}) -> ()",
    f"batch_put(Tensor(a!)[] xs, Tensor[] sources, int[] peers, str group_name, *, {_SIZE}) -> ()",
    f"batch_signal({_SIGNALS}, *, {_SIZE}) -> ()",
    f"batch_wait({_SIGNALS}, *, {_SIZE}) -> ()",
)
_ASYNC = (
    f"all_gather_start(Tensor x, str group_name, *, bool placed=False, {_SIZE}) -> Tensor",
    f"all_gather_wait(Tensor started, Tensor x, str group_name, *, bool placed=False, {_SIZE}) -> Tensor",
    # It writes to what was gathered, for what orders memory: nothing may read that after it.
    f"all_gather_release(Tensor started, Tensor(a!) gathered, str group_name, *, {_SIZE}) -> ()",
    f"reduce_scatter_start(Tensor x, str reduce_op, str group_name, *, {_SIZE}) -> Tensor",
    f"reduce_scatter_wait(Tensor started, Tensor x, str group_name, *, {_SIZE}) -> Tensor",
)
for _schemas, _tags in ((_OF_REGISTERED, _TAGS), (_ASYNC, _ANY_STRIDES)):
    for _schema in _schemas:
        lib.define(_schema, tags=_tags)
        _name = _schema.partition("(")[0]
        globals()[_name] = getattr(torch.ops.weft, _name).default
