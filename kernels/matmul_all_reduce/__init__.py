"""``out = all_reduce(A @ B)``: rows of the product are all-reduced while the next ones are computed."""
