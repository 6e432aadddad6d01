"""The ops' schemas. registration.py has what torch.library is told of them besides.

The ops stand in ``torch.ops.weft`` with the argument order of ``torch.ops.symm_mem``.
"""

from __future__ import annotations

import torch

lib = torch.library.Library("weft", "DEF")
_TAGS = (torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order)
# A start copies an operand that is not contiguous. Were strides asked for, Inductor would copy an expression once for
# each op that takes it, and not know that the start's copy is read until the wait.
_ANY_STRIDES = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)

lib.define(
    "fused_all_gather_matmul(Tensor A_shard, Tensor[] Bs, int gather_dim, str group_name, *, bool return_A=True,"
    " int? group_size=None) -> (Tensor?, Tensor[])",
    tags=_TAGS,
)
lib.define(
    "fused_matmul_reduce_scatter(Tensor A, Tensor B, str reduce_op, int scatter_dim, str group_name, *,"
    " ScalarType? out_dtype=None, Tensor? bias=None, Tensor? residual=None, Tensor[]? more=None,"
    " int? group_size=None) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "fused_all_gather_scaled_matmul(Tensor A_shard, Tensor[] Bs, Tensor A_scale, Tensor[] B_scales, int gather_dim,"
    " str group_name, Tensor?[] biases, Tensor?[] result_scales, ScalarType?[] out_dtypes, bool[] use_fast_accum, *,"
    " bool return_A=True, int? group_size=None) -> (Tensor?, Tensor[])",
    tags=_TAGS,
)
lib.define(
    "fused_scaled_matmul_reduce_scatter(Tensor A, Tensor B, Tensor A_scale, Tensor B_scale, str reduce_op,"
    " int orig_scatter_dim, int scatter_dim_after_maybe_reshape, str group_name, SymInt[]? output_shape,"
    " Tensor? bias=None, Tensor? result_scale=None, ScalarType? out_dtype=None, bool use_fast_accum=False, *,"
    " int? group_size=None) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "one_shot_all_reduce(Tensor x, str reduce_op, str group_name, *, int? group_size=None) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "fused_all_reduce_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str group_name, *,"
    " float weight_offset=0.0, bool round_sum=True, int? group_size=None) -> (Tensor, Tensor)",
    tags=_TAGS,
)
lib.define(
    "fused_all_reduce_rms_norm_quant(Tensor x, Tensor? residual, Tensor weight, float eps, str group_name, *,"
    " Tensor? scale=None, ScalarType? out_dtype=None, str scale_op='reciprocal', float? smallest=None,"
    " float weight_offset=0.0, bool round_sum=True, int? group_size=None) -> (Tensor, Tensor?, Tensor)",
    tags=_TAGS,
)
lib.define(
    "fused_all_reduce_layer_norm(Tensor x, Tensor? residual, Tensor? weight, Tensor? bias, float eps,"
    " str group_name, *, float weight_offset=0.0, int? group_size=None) -> (Tensor, Tensor)",
    tags=_TAGS,
)
lib.define(
    "fused_matmul_all_reduce(Tensor A, Tensor B, str reduce_op, str group_name, *, int? group_size=None)"
    " -> Tensor",
    tags=_TAGS,
)
lib.define(
    "one_shot_all_reduce_(Tensor(a!) x, str reduce_op, str group_name, *, int? group_size=None) -> ()",
    tags=_TAGS,
)
lib.define(
    "one_shot_all_gather(Tensor x, int gather_dim, str group_name, *, int? group_size=None) -> Tensor",
    tags=_TAGS,
)
lib.define(
    "one_shot_all_gather_out(Tensor(a!) out, Tensor x, int gather_dim, str group_name, *, int? group_size=None)"
    " -> ()",
    tags=_TAGS,
)
lib.define(
    "one_shot_reduce_scatter(Tensor x, str reduce_op, int scatter_dim, str group_name, *, int? group_size=None)"
    " -> Tensor",
    tags=_TAGS,
)
lib.define(
    "one_shot_reduce_scatter_out(Tensor(a!) out, Tensor x, str reduce_op, int scatter_dim, str group_name, *,"
    " int? group_size=None) -> ()",
    tags=_TAGS,
)
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
    # It writes to what was gathered, for what orders memory: nothing may read that behind it.
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

all_gather_matmul = torch.ops.weft.fused_all_gather_matmul.default
matmul_reduce_scatter = torch.ops.weft.fused_matmul_reduce_scatter.default
all_gather_scaled_matmul = torch.ops.weft.fused_all_gather_scaled_matmul.default
scaled_matmul_reduce_scatter = torch.ops.weft.fused_scaled_matmul_reduce_scatter.default
all_reduce = torch.ops.weft.one_shot_all_reduce.default
all_reduce_ = torch.ops.weft.one_shot_all_reduce_.default
all_reduce_rms_norm = torch.ops.weft.fused_all_reduce_rms_norm.default
all_reduce_rms_norm_quant = torch.ops.weft.fused_all_reduce_rms_norm_quant.default
all_reduce_layer_norm = torch.ops.weft.fused_all_reduce_layer_norm.default
matmul_all_reduce = torch.ops.weft.fused_matmul_all_reduce.default
all_gather = torch.ops.weft.one_shot_all_gather.default
all_gather_out = torch.ops.weft.one_shot_all_gather_out.default
reduce_scatter = torch.ops.weft.one_shot_reduce_scatter.default
reduce_scatter_out = torch.ops.weft.one_shot_reduce_scatter_out.default
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
