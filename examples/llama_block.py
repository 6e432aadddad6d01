"""A stack of Llama blocks under torch.compile as it is and with weft's pass: one step, times, and some training.

    python examples/llama_block.py                                    # one rank a GPU, or two CPU ranks
    torchrun --nproc-per-node 4 examples/llama_block.py --seq 8192    # the ranks are torchrun's

Each rank computes the unsharded model in float64, too. The exit status is 1 if weft's logits, loss or any gradient
is further from that than it may be, if its losses in training part from the unfused ones, or if nothing was fused.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from llama_model import LLAMA_8B, SMALL, Sizes
from task import Task
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException
from weft.fused_ops import FusionPass, last_plan
from weft.fused_ops.dispatch.profitability import FusionCandidate, expected_gain, predicted_us

# How far, relative and in norm, a result may be from the one in float64, and in training a loss from the unfused one.
# And with weft no further from float64 than WORSE times as far as without, up to a tenth of the limit.
LIMIT = {"float32": 1e-5, "bfloat16": 2e-2, "float16": 2e-2}
WORSE = 1.5


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
    reference = timed("the unsharded model in float64", task.reference)

    # A graph taken from a cache is one that the pass does not see, and cannot report.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    fusion = FusionPass()
    fused = task.stepper(options=fusion.options)
    fused_errors = task.errors(timed("torch.compile with weft's pass, first step", fused), reference)
    say(f"\nevery collective of every graph\n{fusion.report()}")
    good = fusion.report().fused > 0
    if not good:
        say("NOTHING FUSED")
    plain = task.stepper()
    plain_errors = task.errors(timed("\nplain torch.compile, first step", plain), reference)

    limit = LIMIT[sizes.dtype]
    say(f"\n{'relative difference from float64':44}{'plain':>10}{'weft':>10}{'at most':>10}")
    for name, ours in fused_errors.items():
        allowed = min(limit, WORSE * plain_errors[name] + limit / 10)
        fine = ours <= allowed
        good = good and fine
        say(f"{name:44}{plain_errors[name]:10.1e}{ours:10.1e}{allowed:10.1e}{'' if fine else '   TOO FAR'}")

    begun = fusion.report().questions
    before, after = timed(
        f"\n{args.iterations} steps of each", lambda: task.times([plain, fused], args.iterations)
    )
    if device.type == "cuda":
        say(f"\n{'ms, median, slowest rank':44}{'plain':>10}{'weft':>10}{'speed-up':>10}")
        for name, a, b in zip(("forward", "backward", "both"), before, after, strict=True):
            say(f"{name:44}{a:10.2f}{b:10.2f}{a / b:10.2f}")
    asked = fusion.report().questions

    # A difference can also arise late, when memory is used again.
    last = task.errors(fused(), reference)
    if not all(error <= limit for error in last.values()):
        good = False
        say(f"\nafter {args.iterations} steps a difference is {max(last.values()):.1e}   TOO FAR")

    say(f"\n{'loss in training, before each update':44}{'plain':>10}{'weft':>10}{'apart':>10}{'at most':>10}")
    losses: list[float] = []
    for i, (theirs, ours) in enumerate(task.train([plain, fused], args.updates)):
        allowed = limit * theirs
        fine = abs(ours - theirs) <= allowed
        good = good and fine
        say(
            f"{i:<44}{theirs:10.6f}{ours:10.6f}{abs(ours - theirs):10.1e}{allowed:10.1e}{'' if fine else '   TOO FAR'}"
        )
        losses.append(ours)
    if not losses[-1] < losses[0]:
        good = False
        say("NOTHING LEARNT")
    say(f"\nweft's last op ran as {last_plan()}")
    if count := asked.count - begun.count:
        microseconds = (asked.seconds - begun.seconds) / count * 1e6
        say(f"while timed, {count} graphs asked the other ranks, {microseconds:.0f} us each on the host")
    for disagreement in fusion.report().disagreements:
        say(str(disagreement))
    say(f"\n{fusion.report()}\n")
    if device.type == "cuda":
        say(
            f"a step takes {before[2]:.2f} ms without weft, {after[2]:.2f} ms with it: {before[2] / after[2]:.2f} x"
        )
    else:
        say(
            "CPU ranks show that the fused graphs run and give the same numbers. Their times say nothing about NVLink, "
            f"and are not shown: README has the speed-ups on GPUs.\n{predicted(dist.get_world_size())}"
        )
    say("ok" if good else "FAILED")
    return good


def predicted(ranks: int) -> str:
    """What weft predicts of the matmuls of a block on GPUs, forward, at the sizes that the demo has there."""
    s = LLAMA_8B
    heads = s.dim * (s.heads + 2 * s.kv_heads) // s.heads
    matmuls = {
        "qkv": ("all_gather_matmul", heads // ranks, s.dim),
        "o": ("matmul_reduce_scatter", s.dim, s.dim // ranks),
        "up + gate": ("all_gather_matmul", 2 * s.hidden // ranks, s.dim),
        "down": ("matmul_reduce_scatter", s.dim, s.hidden // ranks),
    }
    total, gains = 0.0, {}
    for name, (op, n, k) in matmuls.items():
        c = FusionCandidate(op, s.seq, n, k, ranks, getattr(torch, s.dtype), "cuda")
        total, gains[name] = total + (predicted_us(c) or 0.0), expected_gain(c)
    each = ", ".join(f"{name} {gain:.0f}" for name, gain in gains.items())
    return (
        f"On {ranks} H200 the matmuls of a block of Llama 8B with their collectives are predicted to take "
        f"{total:.0f} us forward, {sum(gains.values()):.0f} less than unfused ({each})."
    )


def run_demo_rank(local_rank: int, args: argparse.Namespace, sizes: Sizes, store: str | None) -> None:
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
    parser.add_argument("--updates", type=int, default=10, help="training steps of each, 2 or more")
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
    if args.updates < 2:
        parser.error(f"--updates: is {args.updates}, must be 2 or more")
    for name in ("kv_heads", "hidden", "seq", "vocabulary"):
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
        run_demo_rank(int(os.environ["LOCAL_RANK"]), args, sizes, None)
        return
    print(
        f"starting {args.ranks} ranks on {args.device}; compiling the model twice takes a minute or more",
        flush=True,
    )
    with tempfile.TemporaryDirectory(prefix="llama-block-") as folder:
        try:
            mp.spawn(run_demo_rank, (args, sizes, f"file://{folder}/store"), args.ranks)
        except (ProcessExitedException, ProcessRaisedException) as e:
            sys.exit(f"rank {e.error_index}: {e}")


if __name__ == "__main__":
    main()
