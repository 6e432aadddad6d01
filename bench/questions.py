"""What it costs that graphs ask the other ranks: steps of the same blocks with each way of ``FusionPass(agree=...)``.

    python bench/questions.py                            # one rank a GPU, or two CPU ranks with small blocks
    torchrun --nproc-per-node 2 bench/questions.py --seq 1024

"train": forward and backward of Llama blocks, each of them compiled by itself, so that each asks twice in a step.
"decode": one token after the other through all blocks, which are one graph, in Inductor's CUDA graphs on GPUs. Nothing
waits for a step's end, so a host may be ahead of its GPU. Each row is the slowest rank's, the ways taken in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed import _functional_collectives as funcol
from torch.nn import functional as F
from weft.fused_ops import FusionPass

WAYS: tuple[bool | str, ...] = (True, "each", False)
WARM_UP = 24  # steps, in which ranks come to trust each other
NAMED = {True: "agree=True", "each": "agree='each'", False: "agree=False"}


def whole_world() -> dist.ProcessGroup:
    return dist.distributed_c10d._get_default_group()


class ShardedBlock(nn.Module):
    """A rank's part of a Llama block, sharded by hand; with a sequence between the products cut, too."""

    def __init__(self, dim: int, hidden: int, heads: int, sequence: bool) -> None:
        super().__init__()
        ranks, self.sequence = dist.get_world_size(), sequence
        self.heads = heads // ranks
        self.qkv = nn.Linear(dim, 3 * dim // ranks, bias=False)
        self.out = nn.Linear(dim // ranks, dim, bias=False)
        self.up, self.gate = (nn.Linear(dim, hidden // ranks, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden // ranks, dim, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(dim, eps=1e-5) for _ in range(2))

    def _whole(self, x: Tensor) -> Tensor:
        return funcol.all_gather_tensor_autograd(x, 0, whole_world()) if self.sequence else x

    def _summed(self, x: Tensor) -> Tensor:
        if self.sequence:
            return funcol.reduce_scatter_tensor_autograd(x, "sum", 0, whole_world())
        return funcol.all_reduce(x, "sum", whole_world())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self._whole(self.norms[0](x))).chunk(3, -1)
        if self.sequence:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
        else:  # a cache's attention is the same for all ways
            y = F.silu(q) * k + v
        x = x + self._summed(self.out(y))
        y = self._whole(self.norms[1](x))
        return x + self._summed(self.down(F.silu(self.gate(y)) * self.up(y)))


def trains(args: argparse.Namespace, device: torch.device, options: dict[str, Any]) -> Callable[[], None]:
    blocks = _blocks(args, device, sequence=True)
    compiled = [torch.compile(b, options=options, dynamic=False) for b in blocks]
    x = torch.randn(args.seq // dist.get_world_size(), args.dim, device=device, dtype=_dtype(device))

    def step() -> None:
        blocks.zero_grad(set_to_none=True)
        y = x
        for block in compiled:
            y = block(y)
        y.float().square().mean().backward()

    return step


def decodes(args: argparse.Namespace, device: torch.device, options: dict[str, Any]) -> Callable[[], None]:
    blocks = _blocks(args, device, sequence=False)
    graphs = {"triton.cudagraphs": True} if device.type == "cuda" else {}
    compiled = torch.compile(nn.Sequential(*blocks), options={**options, **graphs}, dynamic=False)
    x = torch.randn(args.tokens, args.dim, device=device, dtype=_dtype(device))

    def step() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.no_grad():
            compiled(x)

    return step


def _dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _blocks(args: argparse.Namespace, device: torch.device, *, sequence: bool) -> nn.ModuleList:
    made = (ShardedBlock(args.dim, args.hidden, args.heads, sequence) for _ in range(args.blocks))
    return nn.ModuleList(made).to(device, _dtype(device))


def measure_ways(args: argparse.Namespace, device: torch.device, kind: str) -> None:
    """Prints a row for each way."""
    torch._dynamo.reset()
    steps, passes = {}, {}
    for way in WAYS:
        passes[way] = FusionPass(agree=way)
        steps[way] = (trains if kind == "train" else decodes)(args, device, passes[way].options)
        for _ in range(WARM_UP):
            steps[way]()
        _wait(device)
    counts = {}
    rows: dict[bool | str, list[float]] = {way: [] for way in WAYS}
    for i in range(args.rounds):
        for way in WAYS if i % 2 else WAYS[::-1]:
            dist.barrier()
            steps[way]()  # a barrier is a collective that no sequence has
            _wait(device)
            passes[way].clear()
            begin = time.perf_counter()
            for _ in range(args.steps):
                steps[way]()
            _wait(device)
            slowest = torch.tensor((time.perf_counter() - begin) / args.steps * 1e3, device=device)
            counts[way] = passes[way].report().questions
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            rows[way].append(slowest.item())
    for way in WAYS:
        ms, plain = statistics.median(rows[way]), statistics.median(rows[False])
        asked = counts[way]
        text = f"{kind:8}{NAMED[way]:14}{ms:10.3f} ms a step{100 * (ms / plain - 1):+8.2f} %"
        if asked.count:
            text += f"   {asked.count} asked, {asked.fused} fused, {asked.ahead} ahead on rank 0, "
            text += f"{asked.seconds / asked.count * 1e6:.0f} us each"
        if dist.get_rank() == 0:
            print(text, flush=True)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def run_questions_rank(rank: int, ranks: int, args: argparse.Namespace, store: str | None) -> None:
    on_gpus = torch.cuda.device_count() >= ranks
    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    place: dict[str, Any] = (
        {} if store is None else {"init_method": f"file://{store}", "rank": rank, "world_size": ranks}
    )
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(minutes=5), **place)
    torch.manual_seed(rank)
    for kind in args.kinds:
        measure_ways(args, device, kind)
    dist.destroy_process_group()


def main() -> None:
    on_gpus = torch.cuda.device_count() > 1
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kinds", nargs="+", choices=("train", "decode"), default=["train", "decode"])
    for name, value in {
        "ranks": max(2, torch.cuda.device_count()),
        "blocks": 8,
        "rounds": 7,
        "steps": 20,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    sizes = {
        "seq": (1024, 16),
        "tokens": (16, 4),
        "dim": (4096, 64),
        "hidden": (14336, 128),
        "heads": (32, 4),
    }
    for name, (gpu, cpu) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=gpu if on_gpus else cpu)
    args = parser.parse_args()
    if "RANK" in os.environ:
        run_questions_rank(int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"]), args, None)
        return
    with TemporaryDirectory() as folder:
        mp.spawn(run_questions_rank, (args.ranks, args, str(Path(folder, "store"))), nprocs=args.ranks)


if __name__ == "__main__":
    main()
