"""Forms at the edge: sizes of 0 and 1, batches, chains of collectives, products of products. Traced op by op."""

from __future__ import annotations

import pytest
import torch
from graphs import AG, AR, RS, c10d
from spelled import Fn, Shape, ag, ar, only, rs, seen_of, wait
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


# The function, the shapes of its inputs, into what its collectives are fused.
FORMS: dict[str, tuple[Fn, tuple[Shape, ...], list[str | None]]] = {
    "batch, right operand": (lambda x, w: torch.bmm(four(w), ag(x)), ((2, 6, 8), (5, 6)), [AG]),
    "batch plus batch": (
        lambda x, w, b: torch.baddbmm(b, ag(x), four(w)),
        ((2, 6, 8), (8, 5), (4, 6, 5)),
        [AG],
    ),
    "scattered batch": (lambda x, w: rs(torch.bmm(x, four(w))), ((4, 6, 8), (8, 5)), [RS]),
    "batch, repeated and reshaped": (
        lambda x, w: torch.bmm(ag(x), four(w).reshape(4, *w.shape)),
        ((2, 6, 8), (8, 5)),
        [AG],
    ),
    "batch, repeated twice and joined": (
        lambda x, w: torch.bmm(ag(x), w.expand(2, 2, *w.shape).view(4, *w.shape)),
        ((2, 6, 8), (8, 5)),
        [AG],
    ),
    "batch, repeated and transposed": (lambda x, w: torch.bmm(ag(x), four(w).mT), ((2, 6, 8), (5, 8)), [AG]),
    "right operand of a batch, repeated and transposed": (
        lambda x, w: torch.bmm(four(w).mT, ag(x)),
        ((2, 6, 8), (6, 5)),
        [AG],
    ),
    "scattered batch, repeated and transposed": (
        lambda x, w: rs(torch.bmm(x, four(w).transpose(1, 2))),
        ((4, 6, 8), (5, 8)),
        [RS],
    ),
    "each matrix of a batch repeated": (
        lambda x, w: torch.bmm(ag(x), w[:, None].expand(2, 2, 8, 5).reshape(4, 8, 5)),
        ((2, 6, 8), (2, 8, 5)),
        [None],
    ),
    "scattered batch plus vector": (
        lambda x, w, b: rs(torch.baddbmm(b, x, four(w))),
        ((4, 6, 8), (8, 5), (1, 1, 5)),
        [RS],
    ),
    "addmm, right operand": (lambda x, w, b: torch.addmm(b, w, ag(x)), ((3, 8), (5, 6), (8,)), [AG]),
    "addmm, transposed right operand": (
        lambda x, w, b: torch.addmm(b, w, ag(x).t()),
        ((3, 8), (5, 8), (6,)),
        [AG],
    ),
    "gathered flat": (lambda x, w: ag(x).reshape(-1, 8) @ w, ((24,), (8, 5)), [AG]),
    "no rows": (lambda x, w: ag(x) @ w, ((0, 8), (8, 5)), [AG]),
    "no rows scattered": (lambda x, w: rs(x @ w), ((0, 8), (8, 5)), [RS]),
    "no columns reduced": (lambda x, w: ar(x @ w), ((3, 8), (8, 0)), [AR]),
    "no columns": (lambda x, w: ag(x) @ w, ((3, 8), (8, 0)), [AG]),
    "one row": (lambda x, w: ag(x) @ w, ((1, 8), (8, 5)), [AG]),
    "one contracted": (lambda x, w: ag(x) @ w, ((3, 1), (1, 5)), [AG]),
    "one column": (lambda x, w: rs(x @ w), ((4, 3), (3, 1)), [RS]),
    "one column of each rank": (lambda x, w: rs((x @ w).t().contiguous()), ((4, 3), (3, 2)), [RS]),
    "a product is gathered": (lambda x, w: ag(x @ w) @ w, ((3, 8), (8, 8)), [AG]),
    "gathered and scattered": (lambda x, w: rs(ag(x) @ w), ((3, 8), (8, 8)), [None, RS]),
    "gathered and reduced": (lambda x, w: ar(ag(x) @ w), ((3, 8), (8, 8)), [AG, AR]),
    "reduced in another order": (
        lambda x, w: ar((x @ w).reshape(2, 3, 2, 4).permute(0, 2, 1, 3).contiguous()),
        ((6, 8), (8, 8)),
        [AR],
    ),
    "reduced bmm": (lambda x, w: ar(torch.bmm(x, four(w))), ((4, 6, 8), (8, 5)), [AR]),
    "reduced einsum": (lambda x, w: ar(torch.einsum("bhd,hdk->bk", x, w)), ((6, 3, 4), (3, 4, 5)), [AR]),
    "reduced sum of three": (lambda x, w: ar(x @ w + x.sin() @ w + x.cos() @ w), ((6, 8), (8, 5)), [AR]),
    "reduced together": (reduced_together, ((6, 8), (8, 5)), [AR, AR]),
    "slices scattered": (sliced_and_scattered, ((2, 6, 8), (8, 5)), [RS]),
    "scattered into new memory": (scattered_into_new_memory, ((12, 8), (8, 5)), [RS]),
    "reduced one after the other": (chain_of_two, ((6, 8), (8, 8)), [AR, AR]),
    "reduced side by side": (lambda x, w: x + ar(x @ w) + ar(x.sin() @ w), ((6, 8), (8, 8)), [AR, AR]),
    "reduced once and added twice": (twice_the_same, ((6, 8), (8, 8)), [AR]),
    "joined along the dimension it was cut": (
        lambda x, w: torch.cat(ag(x).split([5, 7])) @ w,
        ((6, 8), (8, 5)),
        [AG],
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_form(name: str) -> None:
    fn, shapes, into = FORMS[name]
    seen = only(fn, *shapes)
    assert seen.fused == into, seen.reasons


def test_only_what_stands_side_by_side_is_merged() -> None:
    def ops(name: str) -> int:
        fn, shapes, _ = FORMS[name]
        return seen_of(fn, *shapes).count(AR)

    assert ops("reduced side by side") == 1
    assert ops("reduced one after the other") == 2
