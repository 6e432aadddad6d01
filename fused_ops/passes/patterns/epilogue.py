"""What is added to a reduce-scatter's result, and to nothing else made of it: a bias, a residual, or both.

The op adds both to its float32 sum and rounds once. The graph rounds the sum, adds, and rounds again: a rounding more,
so what the op gives is at least as accurate. On a GPU the result is written once, instead of written, read again,
and written.

An addition is left where it is if it rounds to another dtype than the result's, broadcasts anything but a row, scales
what it adds, or follows something else than reshapes; so it is where the result itself is wanted, or what is added
would be read at another time than it was.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from ..graph.collectives import Collective, communicates
from ..graph.effects import first_write
from ..graph.index_map import Dims, flat_dims, numel, plain, reshaped, same_size
from ..graph.nodes import FLAT, LeftAlone, added_to, aten, between, calls, is_val, only_user, val, what
from ..graph.rewrite import hoist, reshape
from ..graph.sizes import alike, is_contiguous, known, same_shape
from ..graph.views import NEUTRAL, unchanged


@dataclass
class Terms:
    """``bias`` is added to each row, ``residual`` element by element; ``at`` is where the op can stand to read them.

    ``added`` are the additions, and to what each adds. ``path`` leads from the result to the last of them.
    """

    at: fx.Node
    bias: fx.Node | None = None
    residual: fx.Node | None = None
    added: dict[fx.Node, fx.Node] = field(default_factory=dict)
    path: list[fx.Node] = field(default_factory=list)

    @property
    def detail(self) -> str:
        words = [w for w, term in (("bias", self.bias), ("residual", self.residual)) if term is not None]
        return f"{' and '.join(words)} added" if words else ""

    @classmethod
    def after(cls, c: Collective, part: Dims) -> Terms:
        """What follows a reduce-scatter. ``part``: the dimensions of what the op gives, as digits of those of the
        result."""
        found = cls(c.node)
        # Moved to the order of the op's result, a residual would be copied: nothing would be gained.
        if not same_size(flat_dims(part), flat_dims(plain(val(c.wait).shape))):
            return found
        path: list[fx.Node] = []
        node = c.wait
        while is_val(user := only_user(node)) and is_contiguous(val(user)):
            if not calls(user, *FLAT) and unchanged(user) is None:
                if not found._take(user, node, c, part):
                    break
                found.path = [*path, user]
            path.append(user)
            node = user
        return found

    def _take(self, add: fx.Node, node: fx.Node, c: Collective, part: Dims) -> bool:
        """Enters what ``add`` adds to ``node``, and returns True, if the op can add it."""
        term = added_to(node, add)
        if not is_val(term) or not alike(val(add), val(node)):
            return False
        if val(term).dtype != val(node).dtype or val(term).device != val(node).device:
            return False
        whole = same_shape(val(term).shape, val(node).shape)
        if whole and (self.residual is not None or not is_contiguous(val(term))):
            return False
        if not whole and (self.bias is not None or not _is_row(term, node, c, part)):
            return False
        if first_write(c.node, add) is not None:
            return False
        if not term < c.node:
            if any(map(communicates, between(c.node, add))):
                return False  # it would overtake the op
            self.at = add
        if whole:
            self.residual = term
        else:
            self.bias = term
        self.added[add] = node
        return True

    def arguments(self, part: Dims, near: list[fx.Node]) -> dict[str, fx.Node]:
        """The op's, before ``at``. LeftAlone: a size is not there where it is needed."""
        found = {}
        if self.bias is not None:
            found["bias"] = reshape(self.bias, [val(self.bias).shape[-1]], self.at, near)
        if self.residual is not None:
            shape = [numel(digits) for digits in part]
            found["residual"] = reshape(self.residual, shape, self.at, near)
        return found

    def replace(self) -> None:
        """Takes the additions out, also those of the number 0: reshapes between them follow ``at``."""
        if self.added:
            hoist([n for n in self.path if n < self.at], self.at)
        for node in reversed(self.path):
            if (same := unchanged(node)) is not None:
                node.replace_all_uses_with(same)
        for add, node in reversed(self.added.items()):
            add.replace_all_uses_with(node)


def stays_after(node: fx.Node) -> str:
    """What follows a collective's result and is no part of the op; "" where it is not arithmetic with a term."""
    while calls(user := only_user(node), *FLAT):
        node = user
    return f"{what(user)} stays after it" if calls(user, *NEUTRAL, aten.neg.default) else ""


def _is_row(term: fx.Node, node: fx.Node, c: Collective, part: Dims) -> bool:
    """Whether the term is added to each row of what the op gives."""
    shape, have = val(term).shape, val(node).shape
    if not shape or not have or not all(known(size == 1) for size in shape[:-1]):
        return False
    try:
        *_, columns = reshaped(plain(val(c.wait).shape), have)
    except LeftAlone:
        return False
    return known(shape[-1] == have[-1]) and same_size(columns, part[-1])
