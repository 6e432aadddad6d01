"""``A = all_gather(A_shard, dim); out_i = A @ B_i``: shards are multiplied as they arrive."""

OP = "fused_all_gather_matmul"
