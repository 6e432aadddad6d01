"""all_gather(A) @ B of fp8 operands with their scales."""
