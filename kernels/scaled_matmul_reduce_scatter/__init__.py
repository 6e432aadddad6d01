"""reduce_scatter(A @ B) of fp8 operands with their scales."""
