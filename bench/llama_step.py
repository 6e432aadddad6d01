"""A training step of Llama 8B blocks, compiled as it is, with the pass, and with the pass that gathers again.

torchrun --nproc-per-node 2 bench/llama_step.py --layers 8 --seqs 4096,8192

For each length one table: milliseconds of forward, backward and both (medians of steps in turn, the slowest rank's),
and MiB that a step needs beyond what lies there before it. Below it the milliseconds of rank 0's kernels in one step by
kind, and copies on the device of at least a gathered activation's size. The first losses must be alike.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import shlex
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machine
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from weft.fused_ops import FusionPass

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))
from llama import LLAMA_8B, SMALL, Sizes
from task import Task, full_tensor

ALIKE = 1e-3  # losses, relative
# Kinds of kernels, by what their names have; the first that fits.
KINDS = {
    "weft": ("all_gather_matmul", "matmul_reduce_scatter", "one_shot", "all_reduce_rms", "leave", "acquire"),
    "nccl": ("nccl",),
    "attention": ("flash", "fmha", "cudnn"),
    "matmul": ("gemm", "nvjet", "cublas", "cutlass"),
    "side by side": ("cat",),
    "copies": ("Memcpy", "memcpy", "copy_kernel", "Memset"),
    "others": ("",),
}


def kernels(step: Callable[[], Any]) -> tuple[dict[str, float], list[str]]:
    """Milliseconds of the kernels of a step by kind, and the largest copies on the device."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        step()
        torch.cuda.synchronize()
    times: Counter[str] = Counter()
    copies: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        kind = next(kind for kind, names in KINDS.items() if any(name in event.name for name in names))
        times[kind] += event.device_time / 1e3
        if "DtoD" in event.name or kind == "side by side":
            copies[event.name[:70]] += event.device_time / 1e3
    return dict(times), [f"{ms:8.3f} ms {name}" for name, ms in copies.most_common(5)]


def peak(step: Callable[[], Any], device: torch.device) -> float:
    """MiB that a step needs at most, beyond what lies there before it; of the rank that needs most."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    most = torch.tensor(float(torch.cuda.max_memory_allocated() - before), device=device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return float(most) / 2**20


def compare_steps(sizes: Sizes, iterations: int, device: torch.device) -> bool:
    """Prints the tables of one length; whether the losses are alike."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    task = Task(sizes, 1, mesh, device)
    passes = {"weft": FusionPass(), "weft, gathering again": FusionPass(regather=True)}
    steps = {"plain": task.stepper(), **{name: task.stepper(options=p.options) for name, p in passes.items()}}
    # The first compiles; the second one's gradients lie where those of all further steps will.
    losses = {name: float(full_tensor([step(), step()][1].loss)) for name, step in steps.items()}
    times = dict(zip(steps, task.times(list(steps.values()), iterations), strict=True))
    on_gpus = device.type == "cuda"
    peaks = {name: peak(step, device) if on_gpus else float("nan") for name, step in steps.items()}
    say: Callable[..., None] = print if dist.get_rank() == 0 else lambda *_, **__: None
    say(f"\n{sizes}")
    say(f"{'':24}{'forward':>10}{'backward':>10}{'both, ms':>10}{'faster':>8}{'MiB':>10}{'loss':>12}")
    for name, (forward, backward, whole) in times.items():
        say(
            f"{name:24}{forward:10.2f}{backward:10.2f}{whole:10.2f}{times['plain'][2] / whole:8.3f}"
            f"{peaks[name]:10.0f}{losses[name]:12.6f}"
        )
    for name, each in passes.items():
        entries = each.report().entries
        returned, again = (
            sum(word in entry.detail for entry in entries) for word in ("A returned", "gathered again")
        )
        say(f"{name}: {each.report().fused} fused, {returned} return A, {again} gathered again")
    for name, step in steps.items() if on_gpus else ():
        found, copies = kernels(step)  # on all ranks: they run the step together
        say(f"{name:24}" + ", ".join(f"{kind} {found[kind]:.2f}" for kind in KINDS if kind in found))
        say(*(f"{'':8}{copy}\n" for copy in copies), sep="")
    return all(abs(loss - losses["plain"]) <= ALIKE * losses["plain"] for loss in losses.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--seqs", default="4096,8192", help="lengths, by commas; between CPU ranks 128")
    parser.add_argument("--iterations", type=int, default=20, help="timed steps of each")
    given = parser.parse_args()
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    # A graph taken from a cache is one that the pass does not see, and cannot report.
    torch._inductor.config.fx_graph_cache = False
    torch._functorch.config.enable_autograd_cache = False
    if dist.get_rank() == 0:
        command = shlex.join(["bench/llama_step.py", *sys.argv[1:]])
        print(command, machine.described(device.type, dist.get_world_size()))
    alike = True
    for seq in map(int, given.seqs.split(",")) if on_gpus else (128,):
        sizes = dataclasses.replace(LLAMA_8B if on_gpus else SMALL, layers=given.layers, seq=seq)
        torch._dynamo.reset()
        alike = compare_steps(dataclasses.replace(sizes, batch=1), given.iterations, device) and alike
    dist.destroy_process_group()
    return int(not alike)


if __name__ == "__main__":
    sys.exit(main())
