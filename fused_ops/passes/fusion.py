"""The pass itself: each collective of a graph is fused, or left alone with a reason."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from ...symm_mem import Group
from ..library.communicating import why_unordered
from . import matching
from .agreement import fallback_graph
from .agreement.fallback import is_fallback_graph
from .agreement.outcomes import RunOutcomes
from .agreement.signature import Order
from .cache_key import pass_key
from .canonicalize import take_coalesced_apart, to_one_spelling, write_out
from .graph.collectives import Collective, collectives, kind_of
from .graph.effects import custom_ops
from .graph.nodes import LeftAlone
from .graph.rewrite import created_nodes
from .graph.subgraphs import WHY, Called
from .joint import JOINT_SLOT, joint_options
from .keep_grouped import BEFORE_FUSION, grouped_options
from .kernels_ahead.graph_kernels import GraphKernels, note_collective
from .loss_parallel.joint import losses_of
from .norms.eps_as_number import eps_options
from .order.copy_engines import start_when_needed
from .order.costs import table_for
from .order.moves import OrderLimits, reorder
from .order.transports import runs_beside
from .origin import fields_of
from .pass_sequence import SLOT, in_sequence, names_of, passes_of
from .patterns.joined import take_apart
from .patterns.pattern import Pattern, why_not_called_from_cpp
from .patterns.summed_all_reduces import MERGED, merge_all_reduces
from .records.entry import NOTE, Entry
from .records.models import models_of_now
from .records.node import take_record
from .records.report import FusionError, Report
from .records.report_file import log_line, put_into_file, write_reports
from .records.seen import SeenGraphs
from .sequence_parallel.find import put_graph_on_rows
from .settings import AUTO, CAPTURE, OnePass
from .uneven_shards import move_padding


class FusionPass(OnePass, CustomGraphPass):
    """Puts weft's fused ops into graphs that torch.compile makes.

    >>> import torch, torch.distributed as dist
    >>> from torch.distributed._functional_collectives import all_gather_tensor
    >>> from weft.fused_ops import FusionPass
    >>> def model(x, w):
    ...     return all_gather_tensor(x, 0, dist.group.WORLD) @ w
    >>> fusion = FusionPass()
    >>> x, w = torch.randn(4, 8), torch.randn(8, 6)
    >>> y = torch.compile(model, options=fusion.options)(x, w)
    >>> print(fusion.report())
    in       collective              times      each  became                   saves
    graph 0  all_gather_into_tensor      1  0.25 KiB  fused_all_gather_matmul
    <BLANKLINE>
    1 of 1 collectives fused: 1 with a matmul
    votes: 1 run asked the other ranks, ... ms each
    >>> torch.testing.assert_close(y, model(x, w))

    What is not exactly the function that a fused op computes, but for rounding, is left alone, and the report says why.
    A scale of fp8 that is an input of one number is taken to be the same on all ranks.

    Before each run a graph asks whether the other ranks of its groups are about to run the same one; if not, all of
    them run theirs unfused, and the report says what differs.

    A graph that Inductor takes from its cache is as this pass made it (``uuid`` covers weft's sources, the pass's
    settings, the sizes of the groups, and the environment that weft reads), and has its entries of the report with it.

    A pass is a dict of its settings, for json alone. Its copies are the pass itself, so that they fill the same report,
    and so is what is unpickled in a process that has it; in another one that is a pass of the same settings, with
    groups by name. The logger ``weft.passes`` writes a line for each graph and for each new disagreement. docs/pass.md
    says more of each setting.

    Args:
        groups: fuse collectives of these groups only: names, ProcessGroups, 1-D DeviceMeshes or (mesh, dim).
            None for all.
        strict: raise FusionError when a collective is left alone. Out of torch.compile it comes as the
            ``inner_exception`` of an InductorError.
        fuse: "auto" fuses where it is profitable, "always" wherever it is right: an all-reduce then into the matmul
            whose result it reduces, if that can be.
        agree: whether graphs ask. False is for programs of which you know that all ranks run the same graphs in the
            same order: where they do not, a fused op waits for a rank that does not come, until its deadline.
            "capture" is for programs of which you know that what is captured in CUDA graphs is the same on all ranks:
            else it is captured unfused, as its replays cannot ask.
        regather: where a gathered activation would be kept for the gradient of a weight alone, keep the shard and
            gather again in the backward, inside of the product. It needs less memory, and more time.
        collectives: all-gathers, reduce-scatters and all-to-alls that are fused with no matmul become weft's own: True
            whatever their size is, "auto" where that was measured to be faster.
        sequence_parallel: an all-reduce and what follows it row by row, such as a residual and a norm, become a
            reduce-scatter, that on each rank's own rows, and all-gathers where all rows are needed: True wherever that
            is right and sends no more, "auto" where it should be faster. What meets a reduced tensor there **is taken
            to be the same on all ranks**, if it is made of the graph's inputs without a product, or is a gradient made
            with one weight.
        loss_parallel: the cross entropy of gathered logits becomes that of each rank's own columns, forward and
            backward. The targets **are taken to be the same on all ranks**. Where a rank's logits are 256 MiB or more
            for True, or that many bytes, they are made by chunks of rows if nothing else needs them.
        reorder: what is not fused starts earlier and is waited for later, so that what is computed between hides it:
            True without a byte more of peak memory, 0.1 with a tenth more. Copy engines carry what is large enough.

    Raises:
        TypeError: a setting is of another type, or there is no such setting.
        ValueError: a setting takes no such word or number.
    """

    def __init__(self, groups: Iterable[Group] | None = None, strict: bool = False, **settings: Any) -> None:
        super().__init__(groups=groups, strict=strict, **settings)
        self._seen = SeenGraphs()
        self._called = Called()
        self._outcomes = RunOutcomes()
        put_into_file(self.report)

    @property
    def options(self) -> dict[str, Any]:
        """For ``torch.compile(model, options=fusion.options)``.

        Warns if torch._inductor.config.post_grad_custom_post_pass is set to other passes, which do not run then.
        """
        return self._options(())

    def options_with(self, *others: Callable[[fx.Graph], None]) -> dict[str, Any]:
        """``options`` for a model that has graph passes of its own, too: Inductor has one place for all of them.

        >>> import torch
        >>> from weft.fused_ops import FusionPass
        >>> seen = []
        >>> model = torch.compile(torch.sin, options=FusionPass().options_with(seen.append))
        >>> y = model(torch.randn(3))
        >>> len(seen)
        1

        Args:
            others: run before this one, in this order. Functions that are no CustomGraphPass keep a graph out of
                Inductor's cache.

        Raises:
            TypeError: one of them cannot be called.
        """
        return self._options(others)

    def _options(self, others: Sequence[Any]) -> dict[str, Any]:
        dropped = [p for p in passes_of(getattr(inductor_config, SLOT)) if p is not self and p not in others]
        if dropped:
            warnings.warn(
                f"{names_of(dropped)} will not run in models compiled with these options: they replace what "
                f"torch._inductor.config.{SLOT} is set to. options_with({names_of(dropped)}) and weft.compile run all",
                stacklevel=3,
            )
        return self._options_over({}, others)

    def _options_over(self, given: Mapping[str, Any], others: Sequence[Any]) -> dict[str, Any]:
        """Inductor's options ``given``, with this pass after ``others``, and its parts after what stands in their
        places."""
        grouped = grouped_options(self, given.get(BEFORE_FUSION))
        joint = joint_options(self, given.get(JOINT_SLOT))
        return {**given, **grouped, SLOT: in_sequence([*others, self]), **eps_options(given), **joint}

    def report(self) -> Report:
        """What became of every collective of the graphs seen since the pass was made or cleared.

        >>> from weft.fused_ops import FusionPass
        >>> FusionPass().report().entries
        ()

        Disagreements and questions are those of the process in that time: a graph that comes from a cache belongs to
        no pass.
        """
        others = names_of([p for p in passes_of(getattr(inductor_config, SLOT)) if p is not self])
        return self._report(self._applied(self._seen), self._seen, others)

    def _applied(self, graphs: SeenGraphs) -> list[Entry]:
        """Entries as their graphs have run since the pass was made or cleared."""
        return self._outcomes.applied(graphs.entries)

    def _report(
        self,
        entries: Sequence[Entry],
        graphs: SeenGraphs,
        others: str = "",
        asked: Collection[str | None] = (None,),
    ) -> Report:
        """``asked``: by name the graphs of which it has votes and disagreements; None of all."""
        seen = self._outcomes
        differed = [each for each in seen.disagreements() if None in asked or each.graph in asked]
        said = differed, seen.questions(asked), graphs.runs(others), graphs.orders, seen.programs()
        return Report(entries, *said)

    def clear(self) -> None:
        """Empties the report of this pass; its graphs are counted from 0 again.

        >>> from weft.fused_ops import FusionPass
        >>> FusionPass().clear()
        """
        self._seen.clear()
        self._outcomes.reset()

    def uuid(self) -> Any:
        if not is_fallback_graph():
            self._seen.keys.append(models_of_now())
        return f"{pass_key(self)}{' fallback' * is_fallback_graph()}"

    def __call__(self, graph: fx.Graph) -> None:
        if is_fallback_graph():
            return
        to_one_spelling(graph)
        if self.reorder is not None and self.collectives == AUTO:
            start_when_needed(graph)
        numbers = self._begin(graph)
        losses = losses_of(graph)
        self._seen.enter(numbers[0], losses)
        if not losses and not any(collectives(graph)):
            self._seen.graphs[numbers[0]].custom_ops = [*custom_ops(graph)]
            GraphKernels(graph).compile()
            if len(numbers) > 1:
                self._tell(numbers[0])
                self._keep(graph, numbers, None)
            return
        write_out(graph)
        move_padding(graph)
        original = fallback_graph.FallbackGraph(graph, list(collectives(graph))) if self.agree else None
        why_not = None
        if original is not None:
            why_not = fallback_graph.why_not_voted(self.agree == CAPTURE) or original.why_not_kept()
        entries, orders = self._fused(graph, why_not)
        change = None
        if self.reorder is not None:
            limits = OrderLimits(self.reorder, runs_beside(graph), self._voted(entries, why_not))
            change = reorder(graph, table_for(graph), limits)
        kernels = GraphKernels(graph)
        entries = [e.planned(kernels.plans.get(e.node)) for e in entries]
        if original is not None:
            passed = change.crossed if change else frozenset()
            name = original.ask_first(graph, entries, orders, passed, agree=self.agree, calls=kernels.calls)
            entries = [replace(e, signature=name) for e in entries]
        # In lite mode Inductor keeps the order as it is, or is told to.
        if change is not None and change.placed and not inductor_config.fallback_by_default:
            from .order.keep import keep_order  # Inductor's part of it

            keep_order(graph)
        graph.lint()
        self._seen.enter(numbers[0], entries, [change] if change else [])
        self._tell(numbers[0])
        self._keep(graph, numbers, None if original is None else original.graph)
        kernels.compile()

    def _begin(self, graph: fx.Graph) -> list[int]:
        """The numbers of the graph and of those that it calls, which are put back where they must not be fused."""
        numbers = [self._seen.begin()]
        for inner, called in self._called.put_back(graph):
            take_record(inner)
            numbers += called.numbers
            if called.before is not None:
                self._seen.put_back(called.numbers[0], WHY)
                self._tell(called.numbers[0])
        return numbers

    def _fused(self, graph: fx.Graph, why_not: str | None) -> tuple[list[Entry], list[Order]]:
        """Fuses what can be and should be.

        Returns:
            what became of each collective, and what travels, and in which order.
        """
        asked = partial(self._why_not_changed, op=None, why_not_kept=why_not)
        orders: list[Order] = []
        put_graph_on_rows(graph, self, asked)
        apart = take_apart(graph, self, asked, orders)
        left = take_coalesced_apart(graph, self._find, lambda match: self._why_not(match, why_not))
        nodes = list(collectives(graph))
        fields = {n: fields_of(n) for n in nodes}
        merge_all_reduces(nodes, self.groups, asked, orders)
        entries = {n: Entry(**fields[n], reason=reason) for n, reason in left.items()}
        # Reductions first: each takes its products as a whole.
        for node in sorted(nodes, key=lambda n: "gather" in kind_of(n)):
            if node not in entries and (order := self._fuse(node, fields, entries, why_not)) is not None:
                orders.append(order)
        notes = {n: n.meta[NOTE] for n in entries if n.meta.get(NOTE)} | apart
        entries |= {n: entries[n].noted(notes[n]) for n in notes.keys() & entries.keys()}
        return [entries[n] for n in nodes], orders

    def _voted(self, entries: Iterable[Entry], why_not: str | None) -> set[str] | None:
        """The groups whose ranks can compare the order of a graph before each run; None for all."""
        if not self.agree:
            return None
        groups = {e.group for e in entries if e.group is not None and why_not is None}
        return {g for g in groups if fallback_graph.has_ranks(g) and fallback_graph.why_not_asked(g) is None}

    def _tell(self, number: int) -> None:
        """
        Raises:
            FusionError: the pass is strict, and a collective of the graph was left alone.
        """
        report = self._seen.of(number)
        log_line(number, report)
        write_reports()
        if self.strict and report.left:
            raise FusionError(report)

    def _keep(self, graph: fx.Graph, numbers: Sequence[int], before: fx.Graph | None) -> None:
        """Has the graph's code tell of it and of those that it calls, unless another graph calls it."""
        self._seen.put_record(graph, numbers)
        self._called.remember(graph, numbers, before)

    def _find(self, node: fx.Node) -> Pattern:
        return matching.find(Collective.from_node(node, self.groups), self)

    def _fuse(
        self,
        node: fx.Node,
        fields: dict[fx.Node, dict[str, Any]],
        entries: dict[fx.Node, Entry],
        why_not_kept: str | None,
    ) -> Order | None:
        """Fuses one collective if it can be and should be, and enters what became of it and of those merged with it.

        Returns:
            what then travels, and in which order.
        """
        found: dict[str, Any] = {}
        gain: dict[str, Any] = {}
        order = None
        try:
            match = self._find(node)
            found["form"], problem = match.form, match.problem
            if (reason := self._why_not(match, why_not_kept)) is not None:
                raise LeftAlone(reason)
            with created_nodes() as created:
                match.replace()
        except LeftAlone as e:
            if not (others := node.meta.pop(MERGED, ())):
                entries[node] = Entry(**fields[node], **found, reason=str(e))
                return None
            # One is in the place of several already, which other ranks must know of: it is not as it was.
            found["fused_into"] = str(node.target._schema.name)  # type: ignore[union-attr]
            detail = f"{1 + len(others)} all-reduces as one, left alone: {e}"
        else:
            # It may be one that was met before, and left.
            node, others, detail, order = match.collective.node, match.others, match.detail, match.order
            node.meta.pop(MERGED, None)
            note_collective(created, fields[node]["node"])
            found |= {"dim": match.dim, "fused_into": str(match.op._schema.name)}
            if problem is not None:
                gain = dict(zip("mnk", problem, strict=True)) | {"gain": match.gain}
        name = fields[node]["node"]
        entries[node] = Entry(**fields[node], **found, **gain, detail=detail)
        entries |= {n: Entry(**fields[n], **found, detail=f"merged with {name}") for n in others}
        return order

    def _why_not(self, match: Pattern, why_not_kept: str | None) -> str | None:
        """Why what could be fused should not be."""
        if self.fuse == "auto" and (reason := match.why_not_profitable()) is not None:
            return reason
        group = match.collective.group
        reason = self._why_not_changed(group, match.op, why_not_kept)
        if reason is not None or not self.agree or not fallback_graph.has_ranks(group):
            return reason
        return match.why_not_compared()

    def _why_not_changed(self, group: str, op: Any, why_not_kept: str | None) -> str | None:
        """Why no op of this group should take the place of what is in the graph."""
        if (unordered := why_unordered()) is not None:
            return f"{unordered}, with which ranks may communicate in different orders"
        why_not = fallback_graph.why_not_asked(group) if self.agree else None
        why_not = why_not or (why_not_called_from_cpp(op) if op is not None else None)
        return why_not or (why_not_kept if self.agree and fallback_graph.has_ranks(group) else None)
