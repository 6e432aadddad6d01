"""Ranks whose graphs differ never meet a fused op on one side and a plain collective on the other.

So the ranks compare whenever a graph runs, before it does anything: one look at memory that they share (``board``).
Where they do not stand before the same graph, each runs its own as it was before the pass: what a rank runs in eager
mode, over the backend, is what it meets. To agree while compiling would not do: a rank that loads its graph from
Inductor's cache runs no pass, ranks that differ compile another number of graphs, and while one compiles, another may
stand in a collective of a graph that the first one has not got. Nor would it to agree once, at a graph's first run: a
rank may take another path in the tenth step. What is guaranteed stands in ``docs/protocol.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache

import torch
from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor import inductor_prims
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import unset_fake_temporarily

from ....symm_mem import WeftError, resolve_group
from ....symm_mem.groups import native_backends
from ..graph.collectives import collectives, group_of, kind_of, point_to_point
from ..graph.effects import op_with_effect
from ..graph.nodes import argument, calls, what
from ..kernels_ahead.graph_kernels import KeptCall
from ..records.entry import Entry
from ..records.node import packed
from ..settings import CAPTURE
from .fallback import DRAWS, attributes, graph_copy, pickled, why_not_kept
from .guard import SIZES, GraphGuard, GraphQuestion, GroupQuestion
from .signature import NUMBERS, Order, Signature
from .votes.begun import uncounting_backend


def _ask_eagerly(packed: str, fused: bool) -> None:
    """The op ``weft::agree`` where it is run and not generated: this rank's graph runs as it is, whatever others do.
    WeftError: it must not, because something in it was fused."""
    if fused:
        raise WeftError(
            "weft::agree: a graph in which collectives were fused is run without Inductor's generated code, so the "
            "ranks are not asked whether they run the same graph; have Inductor generate the code, or compile with "
            "FusionPass(agree=False) where all ranks run the same graphs in the same order"
        )
    _guard_of(packed).runs_unfused()


@lru_cache(maxsize=256)
def _guard_of(packed: str) -> GraphGuard:
    return GraphGuard(packed)


_agree = op_with_effect("agree(str packed, bool fused)", _ask_eagerly)


def why_not_asked(group: str) -> str | None:
    """Why ranks of ``group`` cannot be asked at run time; None if they can, or if there are no other ranks to ask."""
    backend = uncounting_backend(resolve_group(group))
    if backend == "fake":
        return None
    if inductor_config.cpp_wrapper or inductor_config.fx_wrapper:
        wrapper = "C++" if inductor_config.cpp_wrapper else "FX"
        return f"the {wrapper} wrapper cannot ask the other ranks whether they run the same graph"
    if backend is not None:
        return f"its backend {backend!r} does not count collectives, so ranks cannot agree"
    return None


def why_not_voted(captured: bool) -> str | None:
    """Why no graph that Inductor makes now can vote before each run and run as it was; None if they can. ``captured``:
    whether what is captured in CUDA graphs needs no vote."""
    policy = getattr(inductor_config, "cudagraph_policy", None)
    partitions = inductor_config.graph_partition and policy is None
    if inductor_config.triton.cudagraphs and not partitions and not captured:
        return (
            "the graph is captured whole, in a CUDA graph whose replays cannot ask the other ranks; "
            "graph_partition leaves the question outside of it"
        )
    if inductor_config.fallback_by_default:
        return (
            "with fallback_by_default (lite mode) Inductor runs each op as it is, so the graph cannot leave "
            "for its fallback graph where ranks differ"
        )
    for kind in ("all_gathers", "reduce_scatters", "all_reduces"):
        said = getattr(inductor_config, setting := f"bucket_{kind}_fx", "none")
        if said != "none":
            return (
                f"torch._inductor.config.{setting} is {said!r}: this rank's graph as it was, which has no buckets, "
                "would not meet other ranks' graphs"
            )
    return None


class FallbackGraph:
    """A graph as it is before the pass, to be run by ranks that do not agree."""

    def __init__(self, graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
        self._owner, self._before = graph.owning_module, set(graph.nodes)
        self.graph = graph_copy(graph)
        self._graph = self._without_objects()
        self._numbers = {str(group_of(n)): n.meta[NUMBERS] for n in graph.nodes if NUMBERS in n.meta}
        self._counts: dict[str, int] = {}
        for node in nodes:
            group = group_of(node)
            if group is not None:
                self._counts[group] = self._counts.get(group, 0) + _begins(node, group)
        for group in self._numbers:  # of a loss alone
            self._counts.setdefault(group, 0)

    def _without_objects(self) -> fx.Graph:
        """The graph that is kept. What it returns of objects, DTensors' meshes, the generated code has."""
        objects = {
            n
            for n, value in attributes(self.graph, self._owner)
            if not isinstance(value, torch.Tensor | fx.GraphModule) and all(u.op == "output" for u in n.users)
        }
        if not objects:
            return self.graph
        return graph_copy(self.graph, objects)

    def why_not_kept(self) -> str | None:
        """Why the graph cannot be kept; None if it can."""
        node = _drawn_elsewhere(self._graph)
        if node is not None and getattr(inductor_config, "align_random_eager", False):
            return (
                f"{what(node)} draws random numbers that another graph draws again from the same seed, as for dropout "
                "that is recomputed: with align_random_eager, which the graph that is kept for ranks that do not agree "
                "is compiled without"
            )
        return why_not_kept(self._graph, self._owner)

    def ask_first(
        self,
        graph: fx.Graph,
        entries: Iterable[Entry],
        orders: Iterable[Order],
        passed: Iterable[str] = (),
        *,
        agree: bool | str = True,
        calls: Sequence[KeptCall] = (),
    ) -> str:
        """Puts the question before ``graph``, which is this one after the pass.

        Collectives that were taken apart but not fused count as fused: they are not what other ranks run.

        Args:
            orders: as ``Signature`` has them.
            passed: groups whose collectives have changed their order against those of others.
            calls: whose kernels are compiled when the graph is loaded.

        Returns:
            the name by which ``disagreements`` have the graph; "" if there is nobody to ask.
        """
        entries = tuple(entries)
        order = [g for g in self._counts if has_ranks(g)]
        if not order:
            return ""
        from . import lowering  # noqa: F401  (tells Inductor what the node is)

        index = {g: i for i, g in enumerate(self._counts)}
        changed = {*passed}
        if [kind_of(n) for n in collectives(self._graph)] != [e.collective for e in entries]:
            changed |= self._counts.keys()
        fused = {e.group for e in entries if e.fused_into is not None} | changed
        # What others have, who run it as it was, must not meet other collectives of the backend.
        kept = not fused.isdisjoint(order)
        # Nor need ranks run the same where nothing is fused: there numbers alone are compared, and nobody runs ahead.
        unasked = (kept or not self._numbers) and not any(group_of(n) in changed for n in collectives(graph))
        fused |= self._numbers.keys()
        asked = [
            GroupQuestion(g, self._counts[g], g in fused, resolve_group(g).size(), self._numbers.get(g, 0))
            for g in order
        ]
        signature = Signature(graph, index, fused, entries, orders, before=self._before)
        with unset_fake_temporarily():  # the constants are real
            redraws = _drawn_elsewhere(self._graph) is not None
            original = pickled(self._graph, self._owner) if kept else None
            question = GraphQuestion(
                *(asked, signature.digest, signature.sizes, signature.what, original, redraws),
                *(agree == CAPTURE, unasked, signature.recorded, [*calls]),
            )
            text = packed(question)
        first = next(n for n in graph.nodes if n.op != "placeholder")
        with graph.inserting_before(first):
            node = graph.call_function(_agree, (text, kept))
        node.meta["val"], node.meta[SIZES] = None, signature.symbolic
        return signature.name


def has_ranks(group: str) -> bool:
    """Whether there are other ranks that can be asked, or told that this one is not to be asked: a fake group has none,
    and what AOTInductor makes may run without Python."""
    try:
        pg = resolve_group(group)
    except ValueError:
        return False
    return uncounting_backend(pg) is None and pg.size() > 1 and not V.aot_compilation


def _begins(node: fx.Node, group: str) -> int:
    """How many collectives the backend begins for the node, as ``begun`` counts them: NCCL counts sends apart."""
    sends = point_to_point(node)
    if not sends:
        return 1
    with suppress(ValueError):
        if "nccl" in native_backends(resolve_group(group)):
            return 0
    return len(sends)


def _drawn_elsewhere(graph: fx.Graph) -> fx.Node | None:
    """A node that draws by a seed which is not this graph's own, or not this node's alone."""
    seen: set[tuple[fx.Node, int]] = set()
    for node in graph.nodes:
        if node.target not in DRAWS:
            continue
        seed = argument(node, *DRAWS[node.target])
        if not calls(seed, inductor_prims.lookup_seed) or len(seed.users) > 1 or seed.args in seen:
            return node
        seen.add(seed.args)
        seeds = seed.args[0]
        if not calls(seeds, inductor_prims.seeds) or not all(
            calls(u, inductor_prims.lookup_seed) for u in seeds.users
        ):
            return node
    return None
