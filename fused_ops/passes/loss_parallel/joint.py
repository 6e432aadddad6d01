"""Loss parallelism on the graph of forward and backward, before AOTAutograd's partitioner: what is kept for the
backward are a rank's own columns.

Targets, and rows that are cut out of the logits, are taken to be the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from ...ops.vocabulary import chunks
from ..agreement.signature import COMPARED, compare
from ..graph.collectives import Collective
from ..graph.nodes import FLAT, LeftAlone, aten, c10d, calls, is_val, val, walk, what
from ..graph.row_wise import REDUCTIONS, is_pointwise
from ..graph.sizes import hint, hint_or_one
from ..origin import fields_of
from ..records.entry import NOTE, Entry
from ..settings import LOGITS_BYTES, PassSettings
from .columns import gathered_columns, has_columns, keeps_columns, uncast
from .gradient import path_of
from .linear import put_on_product
from .log_sum import elements_of, log_sum_of, put_log_sum_on_columns
from .replace import ColumnLoss, put_on_columns
from .sharded import put_on_statistics, sharded_loss
from .softmax import log_softmax_of

#: What the op of a loss has in its ``meta``: an ``Entry`` of each collective in the place of which it is.
_ENTRIES = "weft_loss_parallel"


def put_losses_on_columns(graph: fx.Graph, settings: PassSettings) -> None:
    for target, put, left in (
        (c10d.all_gather_into_tensor.default, _put_on_columns, "not loss parallel"),
        (c10d.all_reduce.default, _put_on_statistics, "not one exchange of a loss"),
    ):
        for node in graph.find_nodes(op="call_function", target=target):
            if node._erased:
                continue
            try:
                c = Collective.from_node(node, settings.groups)
            except LeftAlone:
                continue
            try:
                put(c, settings)
            except LeftAlone as e:
                node.meta[NOTE] = f"{left}: {e}"


def _put_on_statistics(c: Collective, settings: PassSettings) -> None:
    if (loss := sharded_loss(c)) is None:
        return
    detail = f"loss parallel, {val(loss.x).shape[1]} columns"
    if hint_or_one(val(loss.x).numel()) * val(uncast(loss.x)).itemsize >= settings.logits:
        detail += "; its logits are whole: how many columns other ranks have is not in this graph"
    entries = [Entry(**fields_of(n), detail=detail) for n in (c.node, *loss.later)]
    _note(put_on_statistics(loss), entries)


def _put_on_columns(c: Collective, settings: PassSettings) -> None:
    if (columns := gathered_columns(c)) is None:
        return
    detail = f"loss parallel, {columns.width} columns of {sum(columns.widths)}"
    entry = Entry(**fields_of(c.node), detail=detail)
    for x in _with_columns(columns.whole):
        if (softmax := log_softmax_of(x)) is not None:
            paths = [path_of(gradient.result, columns) for gradient in softmax.gradients]
            logits = elements_of(x)
            loss = put_on_columns(columns, softmax, paths)
            _put_log_sums(loss, logits)
            op, entries = _put_on_product(loss, entry, settings.logits)
            _compare_what_meets(op, columns.c.group)
            _note(op, entries)
            return
    if (met := _met_before_softmax(columns.whole)) is not None:
        raise LeftAlone(f"its columns meet {what(met)}")


def _met_before_softmax(whole: fx.Node) -> fx.Node | None:
    """What takes gathered columns, not each alone, and has a softmax taken of what it gives."""
    kept = _with_columns(whole)
    for node in (u for n in kept for u in n.users if u not in kept and not calls(u, *REDUCTIONS)):
        made = walk([node], lambda n: (u for u in n.users if calls(u, *FLAT) or is_pointwise(u)))
        if any(calls(u, aten.amax.default) for n in made for u in n.users):
            return node
    return None


def _put_log_sums(loss: ColumnLoss, logits: fx.Node) -> None:
    """Those of the same logits."""
    columns = loss.columns
    for x in () if columns.whole._erased else _with_columns(columns.whole):
        try:
            if elements_of(x) is logits and (found := log_sum_of(x)) is not None:
                paths = [path_of(gradient, columns) for gradient, _ in found.gradients]
                put_log_sum_on_columns(loss, found, paths)
        except LeftAlone as e:
            columns.c.node.meta[NOTE] = f"not loss parallel: {e}"


def _put_on_product(loss: ColumnLoss, entry: Entry, most: int) -> tuple[fx.Node, list[Entry]]:
    widths, itemsize = loss.columns.widths, val(loss.columns.c.x).itemsize
    try:
        rows = hint(val(loss.op.args[3]).numel())  # type: ignore[arg-type]
        # Of a mean rank, as all must choose alike.
        small = rows * sum(widths) * itemsize < len(widths) * most
        if small or (most == LOGITS_BYTES and rows <= chunks.ROWS):  # one chunk has them all
            return loss.op, [entry]
        return put_on_product(loss), [replace(entry, detail=f"{entry.detail}, by chunks of rows")]
    except LeftAlone as e:
        return loss.op, [replace(entry, detail=f"{entry.detail}; its logits are whole: {e}")]


def _with_columns(whole: fx.Node) -> dict[fx.Node, None]:
    """What has gathered columns, each of one other's alone."""
    return walk([whole], lambda n: filter(keeps_columns, n.users))


def _compare_what_meets(op: fx.Node, group: str) -> None:
    """What own columns are computed with; and that there is a loss, where that is nothing."""
    own = [n for n in op.graph.nodes if group in n.meta.get(COMPARED, ())]
    compare((a for n in own for a in n.all_input_nodes if is_val(a) and not has_columns(a)), group)
    op.meta[COMPARED] = {group}


def _note(op: fx.Node, entries: Sequence[Entry]) -> None:
    into = str(op.target._schema.name)  # type: ignore[union-attr]
    op.meta[_ENTRIES] = [replace(entry, fused_into=into) for entry in entries]


def losses_of(graph: fx.Graph) -> list[Entry]:
    """What a graph has in place of gathers of logits, and of reductions of their losses."""
    return [entry for node in graph.nodes for entry in node.meta.get(_ENTRIES, ())]
