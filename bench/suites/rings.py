"""Several puts at once, and a ring of puts beside the fused op."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from accuracy import Expected, of_products
from measure import timed
from parts import Bench
from suite import Run, Suite
from timer import Schedule
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
from registered import Ring, ring_all_gather_matmul

BATCHES = ((8, 4096), (8, 65536), (32, 4096), (4, 1 << 20))  # tensors, bytes of each
PRODUCTS = ((4096, 4096, 7168), (8192, 4096, 14336), (8192, 8192, 14336), (2048, 8192, 5120))  # M, K, N


def _batches(count: int, nbytes: int, device: torch.device) -> Bench:
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    sources = [torch.full((nbytes // 4,), rank + 1.0, device=device) for _ in range(count)]
    targets = [torch.full((nbytes // 4,), -1.0, device=device) for _ in range(count)]
    xs = symm_mem.register(targets)

    def one_by_one(_: int) -> list[Tensor]:
        for x in xs:
            x.signal(left)
        for x, source in zip(xs, sources, strict=True):
            x.put(source, right)
        for x in xs:
            x.wait(left)
        return targets

    def together(_: int) -> list[Tensor]:
        symm_mem.batch_signal([(x, left) for x in xs])
        symm_mem.batch_put([(x, source, right) for x, source in zip(xs, sources, strict=True)])
        symm_mem.batch_wait([(x, left) for x in xs])
        return targets

    def by_backend(_: int) -> list[Tensor]:
        sent = [dist.P2POp(dist.isend, source, right) for source in sources]
        came = [dist.P2POp(dist.irecv, target, left) for target in targets]
        for work in dist.batch_isend_irecv([*sent, *came]):
            work.wait()
        return targets

    sent = torch.full((nbytes // 4,), left + 1.0, device=device, dtype=torch.float64)
    expected = [Expected(sent, torch.zeros_like(sent))] * count
    return Bench({"put": one_by_one, "batch_put": together, "backend": by_backend}, expected, 1)


def _products(m: int, k: int, n: int, run: Run) -> Bench:
    dtype, device = torch.bfloat16 if run.on_gpus else torch.float32, run.device
    x = torch.randn(m // run.world, k, device=device, dtype=dtype)
    w = torch.randn(k, n, device=device, dtype=dtype) / k**0.5
    ring, whole = Ring(x, run.group), torch.empty(m, k, device=device, dtype=dtype)

    def unfused(_: int) -> list[Tensor]:
        dist.all_gather_into_tensor(whole, x)
        return [whole @ w]

    unfused(0)
    product = whole.double() @ w.double()
    calls = {
        "ring": lambda _: [ring_all_gather_matmul(x, w, ring)],
        "fused": lambda _: fused_all_gather_matmul(x, [w], 0, run.group, return_A=False)[1],
        "unfused": unfused,
    }
    return Bench(calls, [of_products(product, product.abs(), 1, dtype)], 1)


class Rings(Suite):
    """Several puts at once, and a ring all-gather + matmul of puts beside the fused op.

    Microseconds of a round in a CUDA graph of many, the median of the rounds and the slower rank's.

    - Batches: as many tensors of so many bytes go to the right rank, each with its signal and wait: by ``put`` one by
      one, by ``batch_signal``, ``batch_put`` and ``batch_wait``, and by NCCL's (gloo's) ``batch_isend_irecv``.
    - Products: all_gather(x) @ w with x [M / W, K] and w [K, N]: the ring of ``examples/registered.py``, whose blocks
      travel while others are multiplied; ``fused_all_gather_matmul``; the group's all-gather before ``mm``.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        super().add_options(parser)
        parser.add_argument("--small", action="store_true", help="small sizes: whether it runs")

    def rows(self, given: argparse.Namespace) -> list[tuple[int, ...]]:
        return [(3, 4096), (24, 16, 20)] if given.small else [*BATCHES, *PRODUCTS]

    def begin(self, run: Run) -> None:
        symm_mem.set_timeout(20)

    def measure(self, row: tuple[int, ...], run: Run) -> None:
        if len(row) == 2:
            count, nbytes = row
            bench, calls = _batches(count, nbytes, run.device), 10
            label = f"{count:3} x {nbytes:8} bytes"
        else:
            m, k, n = row
            bench, calls = _products(m, k, n, run), 4
            label = f"M {m:6} K {k:6} N {n:6}"
        found = timed(bench, Schedule(calls, cycles=2), run.mode, run.device)
        run.wrong |= bool(found.problems)
        cells = "  ".join(f"{name} {us:9.1f}" for name, us in found.medians.items())
        run.say(f"{label}  {cells}  us", *found.problems)


SUITE = Rings()
