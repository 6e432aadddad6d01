"""One Llama block, forward and backward, under torch.compile as it is and with weft's pass.

    python examples/llama_block.py                                    # one rank a GPU, or two CPU ranks
    torchrun --nproc-per-node 4 examples/llama_block.py --seq 8192    # the ranks are torchrun's

Each rank computes the unsharded block in float64, too. The exit status is 1 if weft's output or any gradient
is further from that than it may be, or if the pass fused nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llama import LLAMA_8B, SMALL, LlamaBlock, Sizes, rotary_tables, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from weft.fused_ops import FusionPass, last_plan

# How far, relative and in norm, a result may be from the one in float64. And with weft no further than
# WORSE times as far as without, up to a tenth of the limit.
LIMIT = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
WORSE = 1.5
HEAD_START = (
    10_000_000  # cycles that a GPU waits before a timed step, so that the whole step is queued by then
)


@dataclass
class Step:
    """A forward and a backward pass of the sharded block, and when each began and ended."""

    y: Tensor
    x: Tensor
    block: LlamaBlock
    marks: list[Any]

    def milliseconds(self) -> list[float]:
        """Of the forward pass, of the backward pass, and of both."""
        a, b, c = self.marks
        if isinstance(a, float):
            return [(b - a) * 1e3, (c - b) * 1e3, (c - a) * 1e3]
        c.synchronize()
        return [a.elapsed_time(b), b.elapsed_time(c), a.elapsed_time(c)]


class Task:
    """One block, input and gradient of the output, the same on every rank."""

    def __init__(self, sizes: Sizes, seed: int, mesh: DeviceMesh, device: torch.device) -> None:
        self.sizes, self.mesh, self.device = sizes, mesh, device
        self.dtype: torch.dtype = getattr(torch, sizes.dtype)
        torch.manual_seed(seed)
        with device:
            block = LlamaBlock(sizes).to(self.dtype)
            for norm in (block.attention_norm, block.ffn_norm):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
            self.x = torch.randn(sizes.batch, sizes.seq, sizes.dim, dtype=self.dtype)
            self.grad = torch.randn_like(self.x)
        self.weights = block.state_dict()
        self.tables = rotary_tables(sizes, device)

    def block(self, dtype: torch.dtype) -> LlamaBlock:
        with self.device:
            block = LlamaBlock(self.sizes).to(dtype)
        block.load_state_dict(self.weights)
        return block

    def reference(self) -> dict[str, Tensor]:
        """Output and gradients of the unsharded block in float64."""
        block, x = self.block(torch.float64), self.x.double().requires_grad_()
        y = block(x, *self.tables)
        y.backward(self.grad.double())
        return {"output": y.detach(), **gradients(x, block)}

    def stepper(self, **options: Any) -> Callable[[], Step]:
        """What makes one step of the sharded block, compiled with ``options``."""
        block = self.block(self.dtype)
        shard(block, self.mesh)
        compiled = torch.compile(block, dynamic=False, **options)
        rank, size = self.mesh.get_local_rank(), self.mesh.size()
        x, grad = (t.chunk(size, 1)[rank].contiguous() for t in (self.x, self.grad))
        x.requires_grad_()
        tables = [t.float() for t in self.tables]

        def step() -> Step:
            x.grad = None
            block.zero_grad(set_to_none=True)
            marks = [mark(self.device)]
            y = compiled(x, *tables)
            marks.append(mark(self.device))
            y.backward(grad)
            return Step(y.detach(), x, block, [*marks, mark(self.device)])

        return step

    def errors(self, step: Step, reference: dict[str, Tensor]) -> dict[str, float]:
        """How far the output and each gradient are from the reference: the largest of all ranks."""
        found = {"output": step.y, **gradients(step.x, step.block)}
        errors = []
        for name, wanted in reference.items():
            t = found[name]
            whole = t if isinstance(t, DTensor) else DTensor.from_local(t, self.mesh, [Shard(1)])
            errors.append((whole.full_tensor().double() - wanted).norm() / wanted.norm())
        # A maximum may lose a NaN.
        worst = torch.stack(errors).nan_to_num(nan=torch.inf)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return dict(zip(reference, worst.tolist(), strict=True))

    def times(self, steps: list[Callable[[], Step]], iterations: int) -> list[list[float]]:
        """Milliseconds of forward, backward and both for each of ``steps``: median, of the slowest rank."""
        rows: list[list[list[float]]] = [[] for _ in steps]
        for _ in range(iterations):
            # In turn, so that what else runs on the machine meets all of them alike.
            for step, times in zip(steps, rows, strict=True):
                dist.barrier()
                if self.device.type == "cuda":
                    torch.cuda._sleep(HEAD_START)
                slowest = torch.tensor(step().milliseconds(), dtype=torch.float64, device=self.device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times.append(slowest.tolist())
        return [[statistics.median(column) for column in zip(*times, strict=True)] for times in rows]


def mark(device: torch.device) -> Any:
    """A point in time: of the GPU's stream, or now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def gradients(x: Tensor, block: LlamaBlock) -> dict[str, Tensor]:
    found = {"x": x, **dict(block.named_parameters())}
    missing = [name for name, t in found.items() if t.grad is None]
    if missing:
        raise RuntimeError(f"no gradient of {', '.join(missing)}")
    return {name: t.grad for name, t in found.items() if t.grad is not None}


def demo(args: argparse.Namespace, sizes: Sizes, device: torch.device) -> bool:
    """Run it on this rank. Whether all was well is the same on every rank; rank 0 prints."""

    def say(text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    def timed(text: str, fn: Callable[[], Any]) -> Any:
        say(f"{text} ...")
        start = time.perf_counter()
        result = fn()
        say(f"    {time.perf_counter() - start:.1f} s")
        return result

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Under torchrun every rank has drawn a seed.
    seed = torch.tensor(args.seed, device=device)
    dist.broadcast(seed, 0)
    say(f"{mesh.size()} ranks on {device.type}, {sizes}, seed {seed.item()}")
    task = Task(sizes, int(seed), mesh, device)
    reference = timed("the unsharded block in float64", task.reference)

    # A graph taken from a cache is one that the pass does not see, and cannot report.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    plain = task.stepper()
    plain_errors = task.errors(timed("plain torch.compile, first step", plain), reference)
    fusion = FusionPass()
    fused = task.stepper(options=fusion.options)
    fused_errors = task.errors(timed("torch.compile with weft's pass, first step", fused), reference)
    say(f"\nevery collective of every graph\n{fusion.report()}")
    good = fusion.report().fused > 0
    if not good:
        say("NOTHING FUSED")

    limit = LIMIT[sizes.dtype]
    say(f"\n{'relative difference from float64':36}{'plain':>10}{'weft':>10}{'at most':>10}")
    for name, ours in fused_errors.items():
        allowed = min(limit, WORSE * plain_errors[name] + limit / 10)
        fine = ours <= allowed
        good = good and fine
        what = name if name == "output" else f"gradient of {name}"
        say(f"{what:36}{plain_errors[name]:10.1e}{ours:10.1e}{allowed:10.1e}{'' if fine else '   TOO FAR'}")

    before, after = timed(
        f"\n{args.iterations} steps of each", lambda: task.times([plain, fused], args.iterations)
    )
    say(f"\n{'ms, median, slowest rank':36}{'plain':>10}{'weft':>10}{'speed-up':>10}")
    for name, a, b in zip(("forward", "backward", "both"), before, after, strict=True):
        say(f"{name:36}{a:10.2f}{b:10.2f}{a / b:10.2f}")

    # A difference can also arise late, when memory is used again.
    last = task.errors(fused(), reference)
    if not all(error <= limit for error in last.values()):
        good = False
        say(f"\nafter {args.iterations} steps a difference is {max(last.values()):.1e}   TOO FAR")
    say(f"\nweft's last op ran as {last_plan()}")
    say("ok" if good else "FAILED")
    return good


def run_rank(local_rank: int, args: argparse.Namespace, sizes: Sizes, store: str | None) -> None:
    """``store`` is the file where the ranks meet; None under torchrun."""
    if args.device == "cuda":
        torch.cuda.set_device(local_rank)
        device = torch.device("cuda", local_rank)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // args.ranks))
    backend, own = ("nccl", device) if args.device == "cuda" else ("gloo", None)
    if store is None:
        dist.init_process_group(backend, device_id=own)
    else:
        dist.init_process_group(
            backend, init_method=store, rank=local_rank, world_size=args.ranks, device_id=own
        )
    good = demo(args, sizes, device)
    dist.destroy_process_group()
    if not good:
        sys.exit(1)


def arguments() -> tuple[argparse.Namespace, Sizes]:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    device = "cuda" if gpus > 1 else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=device, help=f"here: {device}")
    parser.add_argument("--ranks", type=int, help="default: one a GPU, or 2; torchrun has its own")
    parser.add_argument("--iterations", type=int, default=20, help="timed steps of each")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    for field in dataclasses.fields(Sizes):
        name, small, large = field.name, getattr(SMALL, field.name), getattr(LLAMA_8B, field.name)
        choices = list(LIMIT) if name == "dtype" else None
        text = f"default: {small}, on GPUs {large}"
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(small), choices=choices, help=text)
    args = parser.parse_args()
    if "WORLD_SIZE" in os.environ:
        args.ranks = int(os.environ["WORLD_SIZE"])
    elif args.ranks is None:
        args.ranks = gpus if args.device == "cuda" else 2
    if args.device == "cuda" and "WORLD_SIZE" not in os.environ and args.ranks > gpus:
        parser.error(f"--ranks: is {args.ranks}, here are {gpus} GPUs")
    given = {f.name: getattr(args, f.name) for f in dataclasses.fields(Sizes)}
    sizes = dataclasses.replace(
        LLAMA_8B if args.device == "cuda" else SMALL, **{k: v for k, v in given.items() if v is not None}
    )
    for name in ("kv_heads", "hidden", "seq"):
        size, option = getattr(sizes, name), name.replace("_", "-")
        if size % args.ranks:
            parser.error(f"--{option}: is {size}, must be a multiple of {args.ranks} ranks")
    if sizes.heads % sizes.kv_heads:
        parser.error(f"--heads: is {sizes.heads}, must be a multiple of {sizes.kv_heads} kv heads")
    if sizes.dim % (2 * sizes.heads):
        parser.error(f"--dim: is {sizes.dim}, must be a multiple of twice {sizes.heads} heads")
    return args, sizes


def main() -> None:
    args, sizes = arguments()
    if "RANK" in os.environ:
        run_rank(int(os.environ["LOCAL_RANK"]), args, sizes, None)
        return
    with tempfile.TemporaryDirectory(prefix="llama-block-") as folder:
        try:
            mp.spawn(run_rank, (args, sizes, f"file://{folder}/store"), args.ranks)
        except (ProcessExitedException, ProcessRaisedException) as e:
            sys.exit(f"rank {e.error_index}: {e}")


if __name__ == "__main__":
    main()
