"""``out = all_reduce(A @ B)``. On CUDA by others: matmul_reduce_scatter/to_all.py, or cuBLAS and all_reduce."""
