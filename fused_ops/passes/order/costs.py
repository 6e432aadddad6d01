"""How long the nodes of a graph take: from a table of numbers that is the same on every rank.

The estimate orders nodes; it is no promise. Each rank must come to the same one, so the table is one of
constants. Sizes that depend on data count as what the graph was made with, or as 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import flop_registry

from ....kernels.device.device_spec import H200
from ....kernels.device.gemm.gemm_tiles import LINK, MULTIPLY_ADDS
from ....symm_mem import resolve_group
from ...dispatch.profitability import FusionCandidate, predicted_us
from ..graph.collectives import communicates, group_of, is_copied, kind_of, starts
from ..graph.nodes import arguments_of
from ..graph.sizes import hint_or_one
from ..memory.alias_sets import size_of, tensors_of
from .transports import COPIED, NETWORK, NVLINK, WEFT

_EXCHANGES = ("all_gather", "reduce_scatter", "all_reduce")


@dataclass(frozen=True)
class CostTable:
    """Rates per microsecond.

    Attributes:
        multiply_adds: of a product of 16 bits; of float32 a quarter.
        memory: bytes that a kernel reads and writes.
        links: bytes that each transport sends, as (transport, rate).
        latency: microseconds of a collective of nothing, but for weft's kernels on CUDA, of which their model knows.
        launch: microseconds of a kernel of nothing.
        contention: how much longer a kernel takes beside a collective.
        late: transports whose collectives begin when the kernel after their start ends. cuBLAS's products occupy each
            SM of Hopper until they end, and NCCL's kernel is ready only once such a product has begun.
    """

    multiply_adds: float = MULTIPLY_ADDS
    memory: float = 2.5e6
    # NCCL's is that of 64 MiB on 2 H100 (bench/results/h100-x2-all_gather.json), of a network one of 400 Gb/s a GPU.
    links: tuple[tuple[str, float], ...] = ((WEFT, LINK), (COPIED, LINK), (NVLINK, 225e3), (NETWORK, 40e3))
    latency: float = 15.0
    launch: float = 2.0
    contention: float = 1.35
    late: tuple[str, ...] = ()


#: Hopper GPUs; and CPU ranks, of the order of one core each.
TABLES = {
    "cuda": CostTable(late=(NVLINK, NETWORK)),
    "cpu": CostTable(30e3, 5e3, ((WEFT, 5e3), (COPIED, 5e3), (NVLINK, 2e3), (NETWORK, 1e3)), 50.0, 2.0, 1.0),
}


def table_for(graph: fx.Graph) -> CostTable:
    """That of the device on which the graph's collectives are."""
    for node in graph.nodes:
        if communicates(node):
            devices = [t.device.type for t in tensors_of(node)]
            return TABLES["cuda" if "cuda" in devices else "cpu"]
    return TABLES["cpu"]


def transfer_time(node: fx.Node, transport: str, table: CostTable) -> float:
    """Microseconds from a collective's start to its end, if it is alone."""
    given, made = sum(map(size_of, node.all_input_nodes)), size_of(node)
    kind = kind_of(node)
    world = _world(node)
    on_cuda = any(t.device.type == "cuda" for n in (node, *node.all_input_nodes) for t in tensors_of(n))
    if transport == WEFT and on_cuda:
        op = next((op for op in _EXCHANGES if op in kind), None)
        if op is not None:
            whole = given * world if op == "all_gather" else given
            return predicted_us(FusionCandidate(op, 1, whole, 0, world, torch.uint8, "cuda")) or 0.0
    if is_copied(node):
        made = given * world  # its own value is a token
    sent = made if "all_gather" in kind else 2 * given if "all_reduce" in kind else given
    return table.latency + sent * (world - 1) / world / dict(table.links)[transport]


def kernel_time(node: fx.Node, table: CostTable) -> float:
    """Microseconds of a kernel that stays where the graph has it: a product, attention, an op of weft.

    Of the latter on CUDA what its plan predicts on an H200, so that all ranks estimate alike. 0 of all else: light
    kernels Inductor fuses and moves, so they hide nothing for certain.
    """
    fused = communicates(node) and not starts(node)
    called = _called(node) if fused else None
    if called is not None and (us := predicted_us(called, H200)) is not None:
        return us
    multiplied = counted_flops(node)
    if not (fused or multiplied):
        return 0.0
    moved = sum(map(size_of, node.all_input_nodes)) + size_of(node)
    rate = table.multiply_adds
    if any(t.dtype == torch.float32 for t in tensors_of(node)):
        rate /= 4
    computed = max(multiplied / 2 / rate, moved / table.memory)
    if called is not None and called.device_type == "cuda":
        return max(table.launch + computed, alone_us(called))
    return table.launch + (max(computed, transfer_time(node, WEFT, table)) if fused else computed)


def _called(node: fx.Node) -> FusionCandidate | None:
    """What an op of weft is called with; None of one that moves registered tensors."""
    kind = kind_of(node).removeprefix("fused_").removeprefix("one_shot_")
    given = tree_map(_value, arguments_of(node))
    x = next((given[name] for name in ("x", "A", "A_shard") if name in given), None)
    op = next((op for op in _EXCHANGES if op in kind), None)
    if x is None or op is None:
        return None
    world, (*lead, last) = _world(node), [hint_or_one(size) for size in x.shape] or [1]
    rows, gathered = prod(lead), world if op == "all_gather" else 1
    dtype, device = x.dtype, x.device.type
    if "matmul" not in kind:
        op = "all_reduce_rms_norm" if "norm" in kind else op
        return FusionCandidate(op, gathered * rows, last, 0, world, dtype, device)
    columns = sum(hint_or_one(B.shape[1]) for B in given.get("Bs") or [given["B"]])
    depth = last + sum(hint_or_one(A.shape[-1]) for A in (given.get("more") or ())[::2])
    if "scaled" in kind:  # two numbers of 8 bits are as one of 16 to the kernels
        kind, dtype, depth = kind.replace("scaled_", ""), torch.bfloat16, depth // 2
    at_end = given.get("gather_dim", given.get("scatter_dim", 0)) in (-1, len(lead))
    if at_end:
        depth *= gathered
    else:
        rows *= gathered
    returned = bool(given.get("return_A", op == "all_gather"))
    return FusionCandidate(kind, rows, columns, depth, world, dtype, device, at_end, returned)


def alone_us(called: FusionCandidate) -> float:
    """Microseconds of the collective in it, on an H200; 0 where nothing predicts that."""
    op = next((op for op in _EXCHANGES if op in called.op), called.op)
    columns = called.k if op == "all_gather" and called.k else called.n
    return predicted_us(replace(called, op=op, n=columns, k=0), H200) or 0.0


def _world(node: fx.Node) -> int:
    group = group_of(node)
    return 2 if group is None else resolve_group(group).size()


def counted_flops(node: fx.Node) -> int:
    """What torch counts for a product, attention or convolution; 0 of everything else."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet not in flop_registry:
        return 0
    args, kwargs = tree_map(_value, (node.args, node.kwargs))
    try:
        counted = flop_registry[packet](*args, **kwargs, out_val=node.meta.get("val"))
    except (AssertionError, TypeError, ValueError, IndexError):
        return 0
    if isinstance(counted, int):
        return counted
    return int(counted.node.hint) if isinstance(counted, torch.SymInt) and counted.node.has_hint() else 0


def _value(argument: Any) -> Any:
    return argument.meta.get("val") if isinstance(argument, fx.Node) else argument
