"""Runs a graph node by node and compares its memory with what was predicted: aliases, sizes, and when each dies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from memory_check.heap_ranges import HeapRanges
from memory_check.report import comes
from torch import fx
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves
from weft.fused_ops.passes.graph.collectives import is_copied
from weft.fused_ops.passes.memory import alias_sets
from weft.fused_ops.passes.memory.live_bytes import LiveBytes, body


@dataclass
class Verified:
    """What a run has shown.

    Attributes:
        problems: what was not as predicted, in words.
        predicted: bytes at each step, by the accountant.
        measured: bytes at each step of the storages that were there.
        results: what the graph returned.
    """

    problems: list[str] = field(default_factory=list)
    predicted: list[int] = field(default_factory=list)
    measured: list[int] = field(default_factory=list)
    results: Any = None


class MemoryVerifier(fx.Interpreter):
    """Interprets a graph that was captured with fake tensors in ``meta["val"]``."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._sets = alias_sets.AliasSets(module.graph)
        self._lives = LiveBytes(self._sets.sets, body(module.graph))
        self._dying = _dying(self._lives)
        self._in_heap = HeapRanges()
        self._there: dict[alias_sets.AliasSet, StorageWeakRef] = {}
        self._sizes: dict[alias_sets.AliasSet, int] = {}

    def verify(self, inputs: Sequence[Any]) -> Verified:
        """Runs it. A graph that writes to its inputs writes to these."""
        found = Verified(predicted=[*self._lives.live])
        last = self._last_uses()
        self.args_iter = iter(inputs)
        for node in self.module.graph.nodes:  # type: ignore[union-attr]
            self.env[node] = self.run_node(node)
            if node.op == "output":
                found.results = self.env[node]
                break
            self._compare(node, found)
            if node in self._lives.at:
                found.measured.append(sum(self._alive().values()))
            for unused in last.get(node, ()):
                del self.env[unused]
            for gone in self._leaving(node):
                self._in_heap.leave(gone.nodes[0].name)
            for dead in self._dying.get(node, ()):
                if dead in self._there and not comes(self._there[dead].expired):
                    maker = dead.nodes[0].name
                    found.problems.append(
                        f"behind {node.name} the {dead.size} bytes that {maker} made are still held"
                    )
        return found

    def _leaving(self, node: fx.Node) -> list[alias_sets.AliasSet]:
        """What lies on the heap, and nothing reads after this node."""
        return [s for s in self._sets.touched(node) if s.pool == alias_sets.HEAP and s.nodes[-1] is node]

    def _last_uses(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node those whose value nothing uses after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:  # type: ignore[union-attr]
            if node.op not in ("placeholder", "get_attr"):
                last[node] = node
            for operand in (*node.all_input_nodes, *alias_sets.held_until(node)):
                if operand in last:
                    last[operand] = node
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, user in last.items():
            found.setdefault(user, []).append(node)
        return found

    def _alive(self) -> dict[alias_sets.AliasSet, int]:
        counted = {s for s in self._sets.sets if s.counted}
        return {n: self._sizes[n] for n, ref in self._there.items() if n in counted and not ref.expired()}

    def _compare(self, node: fx.Node, found: Verified) -> None:
        """What a node made with what was predicted of it."""
        made = [t for t in tree_leaves(self.env[node]) if isinstance(t, torch.Tensor)]
        said = alias_sets.tensors_of(node)
        if len(made) != len(said):
            found.problems.append(f"{node.name} made {len(made)} tensors instead of {len(said)}")
            return
        if is_copied(node):
            self._in_heap.start(node.name)
        for real, own in zip(made, self._sets.made[node], strict=True):
            if own.pool == alias_sets.HEAP:
                if own.nodes[0] is node:
                    there = self._in_heap.come(node.name, real, node.all_input_nodes[0].name)
                    if there is not None:
                        found.problems.append(f"{node.name} has come to where {there} was on the heap")
                continue
            storage = real.untyped_storage()
            known = self._there.get(own)
            if (
                known is not None
                and known.cdata != storage._cdata
                and not (known.expired() or not alias_sets.bytes_of(real))
            ):
                found.problems.append(f"{node.name} is no alias of {own.nodes[0].name}, as predicted")
            if known is None:
                for other, ref in self._there.items():
                    if ref.cdata == storage._cdata and not ref.expired() and alias_sets.bytes_of(real):
                        maker = other.nodes[0].name
                        found.problems.append(f"{node.name} is an alias of {maker}, which was not predicted")
                self._there[own] = StorageWeakRef(storage)
                self._sizes[own] = storage.nbytes()
            if own.counted and storage.nbytes() != own.size:
                found.problems.append(
                    f"{node.name} lies in {storage.nbytes()} bytes, {own.size} were predicted"
                )


def _dying(lives: LiveBytes) -> dict[fx.Node, list[alias_sets.AliasSet]]:
    """For each node the sets that nothing needs after it."""
    found: dict[fx.Node, list[alias_sets.AliasSet]] = {}
    for each in lives.sets:
        if not each.escapes and (interval := lives.interval(each)) is not None:
            found.setdefault(lives.order[interval[1]], []).append(each)
    return found
