"""The ops in ``torch.ops.weft``, with the argument order of ``torch.ops.symm_mem``: those of ``ops/`` by their schemas
there, and those of registered tensors and of collectives that are waited for later by their schemas here.

``schema.all_gather_matmul`` is ``torch.ops.weft.fused_all_gather_matmul.default``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._ops import OpOverload

from ..ops import OPS

lib = torch.library.Library("weft", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# A start copies an operand that is not contiguous. Were strides asked for, Inductor would copy an expression once for
# each op that takes it, and not know that the start's copy is read until the wait.
_ANY_STRIDES = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

if TYPE_CHECKING:

    def __getattr__(name: str) -> OpOverload: ...


for _op in OPS:
    lib.define(_op.schema, tags=_TAGS)
    globals()[_op.name.removeprefix("fused_").removeprefix("one_shot_")] = _op.overload
# Of registered tensors. ``x`` is this rank's, by which the registration is found. All write to it, as far as a graph is
# concerned: so each keeps its place among the others and among what reads the tensor.
lib.define("signal(Tensor(a!) x, int peer, str group_name, *, int? group_size=None) -> ()", tags=_TAGS)
lib.define("wait(Tensor(a!) x, int peer, str group_name, *, int? group_size=None) -> ()", tags=_TAGS)
lib.define(
    "put(Tensor(a!) x, Tensor source, int peer, str group_name, *, int? group_size=None) -> ()", tags=_TAGS
)
lib.define(
    "get(Tensor(a!) x, Tensor(b!) out, int peer, str group_name, *, int? group_size=None) -> ()", tags=_TAGS
)
lib.define(
    "batch_put(Tensor(a!)[] xs, Tensor[] sources, int[] peers, str group_name, *, int? group_size=None) -> ()",
    tags=_TAGS,
)
lib.define(
    "batch_signal(Tensor(a!)[] xs, int[] peers, str group_name, *, int? group_size=None) -> ()", tags=_TAGS
)
lib.define(
    "batch_wait(Tensor(a!)[] xs, int[] peers, str group_name, *, int? group_size=None) -> ()", tags=_TAGS
)

lib.define(
    "all_gather_start(Tensor x, str group_name, *, bool placed=False, int? group_size=None) -> Tensor",
    tags=_ANY_STRIDES,
)
lib.define(
    "all_gather_wait(Tensor started, Tensor x, str group_name, *, bool placed=False, int? group_size=None) -> Tensor",
    tags=_ANY_STRIDES,
)
lib.define(
    # It writes to what was gathered, for what orders memory: nothing may read that after it.
    "all_gather_release(Tensor started, Tensor(a!) gathered, str group_name, *, int? group_size=None) -> ()",
    tags=_ANY_STRIDES,
)
lib.define(
    "reduce_scatter_start(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    tags=_ANY_STRIDES,
)
lib.define(
    "reduce_scatter_wait(Tensor started, Tensor x, str group_name, *, int? group_size=None) -> Tensor",
    tags=_ANY_STRIDES,
)

all_gather_start = torch.ops.weft.all_gather_start.default
all_gather_wait = torch.ops.weft.all_gather_wait.default
all_gather_release = torch.ops.weft.all_gather_release.default
reduce_scatter_start = torch.ops.weft.reduce_scatter_start.default
reduce_scatter_wait = torch.ops.weft.reduce_scatter_wait.default
signal = torch.ops.weft.signal.default
wait = torch.ops.weft.wait.default
put = torch.ops.weft.put.default
get = torch.ops.weft.get.default
batch_put = torch.ops.weft.batch_put.default
batch_signal = torch.ops.weft.batch_signal.default
batch_wait = torch.ops.weft.batch_wait.default
