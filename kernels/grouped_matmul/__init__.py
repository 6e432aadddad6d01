"""``out[i] = A[rows[i]] @ B[expert of i]``: products of rows that are sorted by expert, also of all ranks' rows."""
