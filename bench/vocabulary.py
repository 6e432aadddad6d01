"""Forward and backward of linear cross entropy, tensor-parallel over the vocabulary: weft, torch.compile with gathered
logits, and torch's loss_parallel, by turns; with the peak of memory.

    torchrun --nproc-per-node 2 bench/vocabulary.py --out bench/results/h200-x2-vocabulary.json
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

SHAPES = [(1024, 4096, 131072), (4096, 4096, 131072), (8192, 2048, 131072), (4096, 4096, 152064)]


class Problem(NamedTuple):
    x: Tensor  # [M, H]
    weight: Tensor  # [V / W, H]
    targets: Tensor  # [M]


def by_gathered_logits(p: Problem) -> Tensor:
    group = dist.group.WORLD
    assert group is not None
    logits = collectives.all_gather_tensor_autograd(p.x @ p.weight.t(), gather_dim=1, group=group)
    return cross_entropy(logits.float(), p.targets)


def contenders() -> dict[str, Callable[[Problem], Tensor]]:
    from weft.fused_ops import fused_linear_cross_entropy

    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    compiled = torch.compile(by_gathered_logits)

    def by_loss_parallel(p: Problem) -> Tensor:
        x = DTensor.from_local(p.x, mesh, [Replicate()])
        weight = DTensor.from_local(p.weight, mesh, [Shard(0)])
        targets = DTensor.from_local(p.targets, mesh, [Replicate()])
        with loss_parallel():
            return cross_entropy((x @ weight.t()).float(), targets)

    def by_weft(p: Problem) -> Tensor:
        start = dist.get_rank() * p.weight.shape[0]
        return fused_linear_cross_entropy(p.x, p.weight, p.targets, vocab_start=start)

    return {"weft": by_weft, "compiled": compiled, "loss_parallel": by_loss_parallel}


def step(loss_of: Callable[[Problem], Tensor], p: Problem) -> tuple[Tensor, Tensor]:
    p.x.grad = p.weight.grad = None
    loss = loss_of(p)
    with loss_parallel() if isinstance(loss, DTensor) else nullcontext():
        loss.backward()
    value = loss.full_tensor() if isinstance(loss, DTensor) else loss
    assert p.x.grad is not None
    return value.detach(), p.x.grad


def products(p: Problem) -> None:
    """The three that all of them need."""
    logits = p.x.detach() @ p.weight.detach().t()
    _ = logits @ p.weight.detach(), logits.t() @ p.x.detach()


def elapsed_us(call: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    dist.barrier()
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def measured_row(
    shape: tuple[int, int, int], calls: dict[str, Callable[[Problem], Tensor]], turns: int
) -> dict[str, Any]:
    m, h, v = shape
    device, size = torch.device("cuda", torch.cuda.current_device()), dist.get_world_size()
    torch.manual_seed(0)
    x = torch.randn(m, h, device=device, dtype=torch.bfloat16)
    targets = torch.randint(v, (m,), device=device)
    torch.manual_seed(1 + dist.get_rank())
    weight = torch.randn(v // size, h, device=device, dtype=torch.bfloat16) / h**0.5
    p = Problem(x.requires_grad_(), weight.requires_grad_(), targets)
    row: dict[str, Any] = {"op": "linear_cross_entropy", "M": m, "H": h, "V": v, "world_size": size}
    found = {}
    for name, call in calls.items():
        found[name] = [t.double().clone() for t in step(call, p)]
        step(call, p)
        p.x.grad = p.weight.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step(call, p)
        torch.cuda.synchronize()
        row[f"{name}_peak_bytes"] = torch.cuda.max_memory_allocated() - before
    row["weight_gradient_bytes"] = weight.nbytes
    for name in calls:
        row[f"{name}_loss"] = found[name][0].item()
        difference = (found[name][1] - found["weft"][1]).norm() / found["weft"][1].norm()
        row[f"{name}_grad_x_from_weft"] = difference.item()
    times: dict[str, list[float]] = {name: [] for name in (*calls, "product")}
    for _ in range(turns):
        for name, call in calls.items():
            times[name].append(elapsed_us(lambda call=call: step(call, p)))  # type: ignore[misc]
        times["product"].append(elapsed_us(lambda: products(p)))
    for name, some in times.items():
        slowest = torch.tensor(statistics.median(some), device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        row[f"{name}_us"] = slowest.item()
    row["limit_us"] = row["product_us"]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--turns", type=int, default=15)
    asked = parser.parse_args()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    calls = contenders()
    rows = []
    for shape in SHAPES:
        rows.append(measured_row(shape, calls, asked.turns))
        if dist.get_rank() == 0:
            print(json.dumps(rows[-1]), flush=True)
    if dist.get_rank() == 0 and asked.out is not None:
        about = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
        asked.out.write_text(json.dumps(about, indent=1) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
