"""``out = all_reduce(A @ B)``: few rows. On CUDA others by ..matmul_reduce_scatter, or cuBLAS and ..all_reduce."""

OP = "fused_matmul_all_reduce"
