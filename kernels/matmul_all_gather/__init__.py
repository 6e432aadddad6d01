"""``out = all_gather(A @ B, -1)``: columns of all ranks' products."""

OP = "fused_matmul_all_gather"
