"""``out[i] = A[rows[i]] @ B[expert of i]``: products of rows that are sorted by expert, also of all ranks' rows."""

OP = "fused_all_gather_grouped_matmul"
