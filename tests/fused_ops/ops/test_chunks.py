"""Operands that are larger than a chunk, on real CPU processes: they travel in several."""

from __future__ import annotations

import torch
from opcommon import assert_fused, check, gather, same_on_all, world
from ranks import on_ranks
from test_uneven_collectives import of_all, part
from weft import fused_ops
from weft.kernels.device.collective import host_exchange


@on_ranks(3, fresh=True)
def test_large_operands_travel_in_chunks(rank: int, world_size: int) -> None:
    host_exchange.CHUNK_BYTES = 1000
    counts = [7, 0, 611]  # of rows of 12 bytes: of 1, 0 and 8 epochs
    for _ in range(3):
        x = torch.randn(12345)
        check("all-reduce", fused_ops.one_shot_all_reduce(x, "sum", world()), sum(gather(x)), 1e-6)
        x = torch.randn(6, 2469)
        every = gather(x)
        assert torch.equal(fused_ops.one_shot_all_gather(x, 1, world()).double(), torch.cat(every, 1))
        total = sum(every).chunk(world_size, 1)[rank]
        check("reduce-scatter", fused_ops.one_shot_reduce_scatter(x, "sum", 1, world()), total, 1e-6)
        parts = torch.cat([one.chunk(world_size, 1)[rank] for one in every])
        assert torch.equal(fused_ops.one_shot_all_to_all(x, 1, 0, world()).double(), parts)
        x = torch.randn(counts[rank], 3)
        y = fused_ops.one_shot_all_gather(x, 0, counts=counts)
        assert_fused()
        assert torch.equal(y.double(), of_all(x, counts, 0))
        x = torch.randn(sum(counts), 3)
        y = fused_ops.one_shot_reduce_scatter(x, "sum", 0, counts=counts)
        check("uneven", y, part(sum(gather(x)), counts, 0), 1e-6)
        for rows in (1, 4, 30):
            x, residual = torch.randn(rows, 64), same_on_all(rows, 64, dtype=torch.float32)
            terms = [*gather(x), residual.double()]
            _, sums = fused_ops.fused_all_reduce_rms_norm(x, residual, torch.ones(64), 1e-6, world())
            check("norm", sums, sum(terms), 1e-6, terms)
