"""``sums = residual + all_reduce(x)``, ``normed = rms_norm(sums) * weight``: one kernel."""

OP = "fused_all_reduce_rms_norm"
LAYER_NORM = "fused_all_reduce_layer_norm"
COMBINE = "fused_moe_combine_all_reduce_rms_norm"
QUANT = "fused_all_reduce_rms_norm_quant"
