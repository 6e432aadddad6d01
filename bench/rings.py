"""Several puts at once, and a ring all-gather + matmul of puts beside the fused op.

torchrun --nproc-per-node 2 bench/rings.py

Microseconds of a round in a CUDA graph of many, the median of the rounds and the slower rank's; between CPU ranks one
clock measures all. Each contender's result is compared.

- Batches: as many tensors of so many bytes go to the right rank, each with its signal and wait: by ``put`` one after
  the other, by ``batch_signal``, ``batch_put`` and ``batch_wait``, and by NCCL's (gloo's) ``batch_isend_irecv``.
- Products: all_gather(x) @ w with x [M / W, K] and w [K, N]: the ring of ``examples/registered.py``, whose blocks
  travel while others are multiplied; ``fused_all_gather_matmul``; the group's all-gather before ``mm``.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import machine
import torch
import torch.distributed as dist
from transfers import GRAPH, Run, timed_calls
from weft import symm_mem
from weft.fused_ops import fused_all_gather_matmul

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from registered import Ring, ring_all_gather_matmul

BATCHES = ((8, 4096), (8, 65536), (32, 4096), (4, 1 << 20))  # tensors, bytes of each
PRODUCTS = ((4096, 4096, 7168), (8192, 4096, 14336), (8192, 8192, 14336), (2048, 8192, 5120))  # M, K, N
Contender = tuple[Run, Callable[[], bool]]  # a round, and whether the last one was right


def _neighbours() -> tuple[int, int]:
    rank, size = dist.get_rank(), dist.get_world_size()
    return (rank + 1) % size, (rank - 1) % size


def _batch_contenders(count: int, nbytes: int, device: torch.device) -> dict[str, Contender]:
    right, left = _neighbours()
    sources = [torch.full((nbytes // 4,), float(dist.get_rank()), device=device) for _ in range(count)]
    targets = [torch.full((nbytes // 4,), -1.0, device=device) for _ in range(count)]
    xs = symm_mem.register(targets)

    def one_by_one() -> None:
        for x in xs:
            x.signal(left)
        for x, source in zip(xs, sources, strict=True):
            x.put(source, right)
        for x in xs:
            x.wait(left)

    def together() -> None:
        symm_mem.batch_signal([(x, left) for x in xs])
        symm_mem.batch_put([(x, source, right) for x, source in zip(xs, sources, strict=True)])
        symm_mem.batch_wait([(x, left) for x in xs])

    def by_backend() -> None:
        sent = [dist.P2POp(dist.isend, source, right) for source in sources]
        came = [dist.P2POp(dist.irecv, target, left) for target in targets]
        for work in dist.batch_isend_irecv([*sent, *came]):
            work.wait()

    def right_data() -> bool:
        done = all(bool((target == left).all()) for target in targets)
        for target in targets:
            target.fill_(-1)
        return done

    runs = {"put": one_by_one, "batch_put": together, "backend": by_backend}
    return {name: (run, right_data) for name, run in runs.items()}


def _product_contenders(m: int, k: int, n: int, device: torch.device) -> dict[str, Contender]:
    size, group = dist.get_world_size(), dist.distributed_c10d._get_default_group()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    x = torch.randn(m // size, k, device=device, dtype=dtype)
    w = torch.randn(k, n, device=device, dtype=dtype) / k**0.5
    ring, whole, found = Ring(x, group), torch.empty(m, k, device=device, dtype=dtype), [torch.empty(0)]

    def by_ring() -> None:
        found[0] = ring_all_gather_matmul(x, w, ring)

    def fused() -> None:
        found[0] = fused_all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]

    def unfused() -> None:
        dist.all_gather_into_tensor(whole, x)
        found[0] = whole @ w

    def near() -> bool:
        dist.all_gather_into_tensor(whole, x)
        expected = whole @ w
        return bool((found[0] - expected).abs().max() <= 2**-6 * expected.abs().max())

    runs = {"ring": by_ring, "fused": fused, "unfused": unfused}
    return {name: (run, near) for name, run in runs.items()}


def _took(contender: Contender, calls: int, device: torch.device) -> str:
    run, is_right = contender
    for _ in range(3):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    dist.barrier()
    fine = is_right()
    dist.barrier()

    def many() -> None:
        for _ in range(calls):
            run()

    if device.type == "cpu":
        return f"{timed_calls(many, calls, device, 0):9.1f}{' ' if fine else '!'}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many()
    took = timed_calls(graph.replay, calls, device, GRAPH)
    return f"{took:9.1f}{' ' if fine and is_right() else '!'}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--small", action="store_true", help="small sizes: whether it runs")
    given = parser.parse_args()
    device = machine.join_ranks()
    symm_mem.set_timeout(20)
    printed: list[str] = []

    def show(line: str) -> None:
        printed.append(line)
        if dist.get_rank() == 0:
            print(line, flush=True)

    described = machine.described(device.type, dist.get_world_size())
    show(f"{shlex.join(['bench/rings.py', *sys.argv[1:]])} {described}")
    for count, nbytes in ((3, 4096),) if given.small else BATCHES:
        made = _batch_contenders(count, nbytes, device)
        cells = [f"{name} {_took(each, 10, device)}" for name, each in made.items()]
        show(f"{count:3} x {nbytes:8} bytes  {'  '.join(cells)}  us")
    for m, k, n in ((24, 16, 20),) if given.small else PRODUCTS:
        made = _product_contenders(m, k, n, device)
        cells = [f"{name} {_took(each, 4, device)}" for name, each in made.items()]
        show(f"M {m:6} K {k:6} N {n:6}  {'  '.join(cells)}  us")
    dist.destroy_process_group()
    return int(any("!" in line for line in printed[1:]))


if __name__ == "__main__":
    sys.exit(main())
