"""What carries a collective, and which nodes start and end it.

Collectives of one transport run one at a time, in their order. Those of two may be on their way at once.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field

import torch.distributed as dist
from torch import fx

from ....symm_mem import resolve_group
from ..graph.collectives import communicates, group_of, is_copied, kind_of, starts, waits
from ..memory.alias_sets import size_of, started_by, tensors_of

#: weft's kernels, copy engines, and backends inside of a host and beyond it.
WEFT, COPIED, NVLINK, NETWORK = "weft", "copy engines", "NVLink", "network"


@dataclass
class Transfer:
    """A collective that runs beside what follows until it is waited for.

    Attributes:
        start: the collective.
        waits: the nodes that wait for it.
        transport: one of the above.
        group: its group's name.
        given, made: bytes of its operands and of its results.
        time: microseconds that it takes alone.
    """

    start: fx.Node
    transport: str
    group: str | None
    given: int
    made: int
    time: float = 0.0
    waits: list[fx.Node] = field(default_factory=list)

    @property
    def gathers(self) -> bool:
        return "all_gather" in kind_of(self.start)


def transfers(order: list[fx.Node]) -> list[Transfer]:
    """Those of a graph, in their order. What weft's kernels carry is none: what follows on the stream waits for it."""
    found = {
        n: Transfer(n, transport_of(n), group_of(n), sum(map(size_of, n.all_input_nodes)), size_of(n))
        for n in order
        if starts(n)
    }
    for node in order:
        if waits(node):
            for start in started_by(node):
                if start in found:
                    found[start].waits.append(node)
                    if is_copied(start):  # its own value is a token
                        found[start].made += size_of(node)
    return [*found.values()]


def transport_of(node: fx.Node) -> str:
    """An op of weft's own, or the group's."""
    if node.target.namespace == "weft":  # type: ignore[union-attr]
        return COPIED if is_copied(node) else WEFT
    return transport_of_group(group_of(node))


def transport_of_group(group: str | None) -> str:
    """By the group's ranks; torchrun's LOCAL_WORLD_SIZE says how many of them share a host."""
    if group is None:
        return NETWORK
    try:
        pg = resolve_group(group)
    except ValueError:
        return NETWORK
    if "weft" in dist.get_backend_config(pg):
        return WEFT
    ranks = dist.get_process_group_ranks(pg)
    local = int(os.environ.get("LOCAL_WORLD_SIZE") or 0) or dist.get_world_size()
    return NVLINK if len({rank // local for rank in ranks}) == 1 else NETWORK


def runs_beside(graph: fx.Graph) -> bool:
    """Whether collectives may be on their way while an op of weft runs: on CUDA its kernel waits for peers on all SMs
    but the reserved ones, and what another rank runs first may find none."""
    devices = {t.device.type for n in graph.nodes if communicates(n) for t in tensors_of(n)}
    return "cuda" not in devices or os.environ.get("WEFT_RESERVED_SMS", "0") != "0"
