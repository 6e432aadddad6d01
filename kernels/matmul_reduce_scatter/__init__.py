"""``out = reduce_scatter(A @ B, dim)``: tiles travel as they are finished, and the owner sums them."""

OP = "fused_matmul_reduce_scatter"
