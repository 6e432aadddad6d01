"""Forms at the edge: sizes of 0 and 1, batches, chains of collectives, products of products. Traced op by op."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import AG, AR, RS, c10d
from spelled import ag, ar, only, rs, seen_of, wait
from torch import Tensor

pytestmark = pytest.mark.usefixtures("two")


def chain_of_two(x: Tensor, w: Tensor) -> Tensor:
    y = ar(x @ w)
    return y + ar(y.sin() @ w)


def twice_the_same(x: Tensor, w: Tensor) -> Tensor:
    y = ar(x @ w)
    return y + y


def sliced_and_scattered(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return rs(torch.cat([y[:, :3], y[:, 3:]]))


def scattered_into_new_memory(x: Tensor, w: Tensor) -> Tensor:
    out = torch.empty(6, 5)
    return wait(c10d.reduce_scatter_tensor_out(x @ w, "sum", 2, "0", out=out))


def reduced_together(x: Tensor, w: Tensor) -> list[Tensor]:
    return [*map(wait, c10d.all_reduce_coalesced([x @ w, x.sin() @ w], "sum", "0"))]


def four(w: Tensor) -> Tensor:
    return w.expand(4, *w.shape)


X3, X4, X, Y, W, V = (2, 6, 8), (4, 6, 8), (6, 8), (3, 8), (8, 5), (8, 8)
# The function, into what its collectives are fused, and the shapes of its inputs.
FORMS: dict[str, tuple[Any, ...]] = {
    "batch, right operand": (lambda x, w: torch.bmm(four(w), ag(x)), [AG], X3, (5, 6)),
    "batch plus batch": (lambda x, w, b: torch.baddbmm(b, ag(x), four(w)), [AG], X3, W, (4, 6, 5)),
    "scattered batch": (lambda x, w: rs(torch.bmm(x, four(w))), [RS], X4, W),
    "batch, repeated and reshaped": (
        lambda x, w: torch.bmm(ag(x), four(w).reshape(4, *w.shape)),
        *([AG], X3, W),
    ),
    "batch, repeated twice and joined": (
        lambda x, w: torch.bmm(ag(x), w.expand(2, 2, *w.shape).view(4, *w.shape)),
        *([AG], X3, W),
    ),
    "batch, repeated and transposed": (lambda x, w: torch.bmm(ag(x), four(w).mT), [AG], X3, (5, 8)),
    "right operand of a batch, repeated and transposed": (
        lambda x, w: torch.bmm(four(w).mT, ag(x)),
        *([AG], X3, (6, 5)),
    ),
    "scattered batch, repeated and transposed": (
        lambda x, w: rs(torch.bmm(x, four(w).transpose(1, 2))),
        *([RS], X4, (5, 8)),
    ),
    "each matrix of a batch repeated": (
        lambda x, w: torch.bmm(ag(x), w[:, None].expand(2, 2, 8, 5).reshape(4, 8, 5)),
        *([None], X3, (2, 8, 5)),
    ),
    "scattered batch plus vector": (lambda x, w, b: rs(torch.baddbmm(b, x, four(w))), [RS], X4, W, (1, 1, 5)),
    "addmm, right operand": (lambda x, w, b: torch.addmm(b, w, ag(x)), [AG], Y, (5, 6), (8,)),
    "addmm, transposed right operand": (lambda x, w, b: torch.addmm(b, w, ag(x).t()), [AG], Y, (5, 8), (6,)),
    "gathered flat": (lambda x, w: ag(x).reshape(-1, 8) @ w, [AG], (24,), W),
    "no rows": (lambda x, w: ag(x) @ w, [AG], (0, 8), W),
    "no rows scattered": (lambda x, w: rs(x @ w), [RS], (0, 8), W),
    "no columns reduced": (lambda x, w: ar(x @ w), [AR], Y, (8, 0)),
    "no columns": (lambda x, w: ag(x) @ w, [AG], Y, (8, 0)),
    "one row": (lambda x, w: ag(x) @ w, [AG], (1, 8), W),
    "one contracted": (lambda x, w: ag(x) @ w, [AG], (3, 1), (1, 5)),
    "one column": (lambda x, w: rs(x @ w), [RS], (4, 3), (3, 1)),
    "one column of each rank": (lambda x, w: rs((x @ w).t().contiguous()), [RS], (4, 3), (3, 2)),
    "a product is gathered": (lambda x, w: ag(x @ w) @ w, [AG], Y, V),
    "gathered and scattered": (lambda x, w: rs(ag(x) @ w), [None, RS], Y, V),
    "gathered and reduced": (lambda x, w: ar(ag(x) @ w), [AG, AR], Y, V),
    "reduced in another order": (
        lambda x, w: ar((x @ w).reshape(2, 3, 2, 4).permute(0, 2, 1, 3).contiguous()),
        *([AR], X, V),
    ),
    "reduced bmm": (lambda x, w: ar(torch.bmm(x, four(w))), [AR], X4, W),
    "reduced einsum": (lambda x, w: ar(torch.einsum("bhd,hdk->bk", x, w)), [AR], (6, 3, 4), (3, 4, 5)),
    "reduced sum of three": (lambda x, w: ar(x @ w + x.sin() @ w + x.cos() @ w), [AR], X, W),
    "reduced together": (reduced_together, [AR, AR], X, W),
    "slices scattered": (sliced_and_scattered, [RS], X3, W),
    "scattered into new memory": (scattered_into_new_memory, [RS], (12, 8), W),
    "reduced one after the other": (chain_of_two, [AR, AR], X, V),
    "reduced side by side": (lambda x, w: x + ar(x @ w) + ar(x.sin() @ w), [AR, AR], X, V),
    "reduced once and added twice": (twice_the_same, [AR], X, V),
    "joined along the dimension it was cut": (lambda x, w: torch.cat(ag(x).split([5, 7])) @ w, [AG], X, W),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    fn, into, *shapes = FORMS[name]
    seen = only(fn, *shapes)
    assert seen.fused == into, seen.reasons


def test_only_what_stands_side_by_side_is_merged() -> None:
    def ops(name: str) -> int:
        fn, _, *shapes = FORMS[name]
        return seen_of(fn, *shapes).count(AR)

    assert ops("reduced side by side") == 1
    assert ops("reduced one after the other") == 2
