"""A process that compiles programs of weft's ops under some of Inductor's settings, and prints what it generates.

    python fresh.py {weft first | Inductor first} {op | pass}:setting ...

Inductor may be there before weft or come after it; the ops may be called in the program or be put in by the pass.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import collector  # noqa: F401
import torch
import torch.distributed as dist
from stack import with_room
from torch.testing._internal.distributed.fake_pg import FakeStore

first, *cases = sys.argv[1:]
if first == "Inductor first":
    import torch._inductor.compile_fx
import weft.fused_ops  # noqa: E402

if first == "weft first":
    assert "torch._inductor" not in sys.modules

from compiler import leave_out_measurements  # noqa: E402
from programs import Program, compiled, drawn, with_work, written  # noqa: E402
from torch._inductor import config  # noqa: E402
from torch._inductor.comm_analysis import estimate_nccl_collective_runtime  # noqa: E402
from torch._inductor.utils import contains_collective, contains_wait  # noqa: E402
from torch.distributed._functional_collectives import all_gather_tensor, reduce_scatter_tensor  # noqa: E402

SHAPES = ((4, 16), (16, 16))


def swap(nodes: list[Any]) -> list[Any]:
    """As ``simple_overlap``, on by default from torch 2.14 on: each collective is raised, each wait sunk, past whatever
    it has no data of. Only what torch knows for collectives keeps its order."""
    for wanted, step in ((contains_collective, -1), (contains_wait, 1)):
        for node in [n for n in nodes if wanted(n)][::-step]:
            at = nodes.index(node)
            while 0 <= at + step < len(nodes) and not wanted(nodes[at + step]):
                early, late = (nodes[at + step], node)[::step] if step < 0 else (node, nodes[at + step])
                needs = {dep.name for dep in late.unmet_dependencies}
                if needs & {*early.get_buffer_names()}:
                    break
                nodes[at], nodes[at + step] = nodes[at + step], node
                at += step
    return nodes


def estimate(nodes: list[Any]) -> list[Any]:
    """As on GPUs: torch asks how long each collective takes."""
    for node in nodes:
        if contains_collective(node):
            assert estimate_nccl_collective_runtime(node.node) > 0
    return nodes


PASSES: dict[str, list[Any]] = {
    "greedy": [estimate, "sink_waits", "raise_comms", "reorder_compute_for_overlap"],
    "swaps": [swap],
}


def sharded(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
    """What the pass fuses, with local work between that Inductor would rather have elsewhere."""
    out = []
    for i in range(1, 5):
        rows = (x.mean(0, keepdim=True).expand(2 * i * 256, 16) @ w).view(256, 2 * i, 16).mean(0)
        h = all_gather_tensor(rows, 0, dist.group.WORLD) @ w
        out.append(reduce_scatter_tensor(h.relu() @ w, "sum", 0, dist.group.WORLD))
    return out


def orders(calls: str, setting: str) -> list[Any]:
    """Of each program."""
    group = dist.distributed_c10d._get_default_group().group_name
    found = []
    with config.patch(
        reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=PASSES[setting]
    ):
        if calls == "pass":
            for agree in (False, True):
                options = weft.fused_ops.FusionPass(agree=agree, fuse="always").options
                found.append(compiled(sharded, SHAPES, False, options=options)[0])
        else:
            for seed in (3, 5):
                program: Program = drawn(seed, group)
                got = compiled(with_work(program, seed), SHAPES, False)[0]
                found += [written(program, SHAPES, False), got]
    return found


dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
leave_out_measurements()
print(json.dumps({case: with_room(orders, *case.split(":")) for case in cases}))
