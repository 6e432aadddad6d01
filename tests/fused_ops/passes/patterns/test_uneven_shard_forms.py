"""Rows that the ranks cannot share evenly, padded beside a collective, and near misses: the same numbers as unfused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graphs import AG, RS, Cases
from spelled import ag, aten, only, rs
from torch import Tensor, fx
from weft.fused_ops.dispatch import profitability
from weft.fused_ops.passes import FusionPass

pytestmark = pytest.mark.usefixtures("two")
X, W, V = (6, 8), (8, 6), (6,)
CASES = Cases()
case = CASES.case


def in_parts(y: Tensor, *pads: int) -> Tensor:
    """Cut into parts of 3 rows, and each padded by so many, as DTensor scatters them."""
    parts = [aten.constant_pad_nd(p, [0, 0, 0, n]) if n else p for p, n in zip(y.split(3), pads, strict=True)]
    return torch.cat(parts)


@case([None], (5, 8), W)
def a_padded_part_that_is_also_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return rs(in_parts(y, 0, 1)), y


@case([None], (5, 8), W)
def a_part_that_is_also_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    a, b = (x @ w).split(3)
    return rs(torch.cat([a, aten.constant_pad_nd(b, [0, 0, 0, 1])])), b.sin()


@case([None], (5, 8), W)
def a_part_padded_by_another_number(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).split(3)
    return rs(torch.cat([a, aten.constant_pad_nd(b, [0, 0, 0, 1], 2.0)]))


@case([None], (5, 8), W)
def a_part_padded_before(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).split(3)
    return rs(torch.cat([a, aten.constant_pad_nd(b, [0, 0, 1, 0])]))


@case([AG], X, W)
def the_last_row_cut_off_and_kept(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = ag(x)[:11]
    return y @ w, y.sin()


@case([None], X, W)
def the_last_row_cut_off_and_written(x: Tensor, w: Tensor) -> Tensor:
    y = ag(x)[:11]
    y[3].mul_(2)
    return y @ w


@case([None], (3, 8), W)
def a_part_padded_before_others_split(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).split([1, 2])
    return rs(torch.cat([aten.constant_pad_nd(a, [0, 0, 0, 1]), b]))


@case([None], (3, 8), W)
def a_part_padded_before_others_sliced(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    return rs(torch.cat([aten.constant_pad_nd(y[:1], [0, 0, 0, 1]), y[1:]]))


def sequences(y: Tensor, *pads: int) -> Tensor:
    """Two sequences of 5 rows, each cut into parts of 3 rows, which are padded by so many; as they are scattered."""
    parts = y.view(2, 5, 6).split(3, 1)
    padded = [
        aten.constant_pad_nd(p, [0, 0, 0, n]) if n else p.clone() for p, n in zip(parts, pads, strict=True)
    ]
    return torch.cat(torch.cat(padded, 1).split(3, 1))


@case([RS], (10, 8), W)
def parts_of_sequences_with_others_between(x: Tensor, w: Tensor) -> Tensor:
    """[S, B, D], along the first of which all is padded."""
    a, b = (x @ w).view(5, 2, 6).split(3)
    return rs(torch.cat([a, aten.constant_pad_nd(b, [0, 0, 0, 0, 0, 1])]))


@case([None], (10, 8), W)
def parts_of_sequences_one_of_which_is_written(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).view(2, 5, 6).split(3, 1)
    first = a.clone()
    first[0].mul_(2)
    return rs(torch.cat(torch.cat([first, aten.constant_pad_nd(b, [0, 0, 0, 1])], 1).split(3, 1)))


@case([None], (10, 8), W)
def parts_padded_along_another_dimension(x: Tensor, w: Tensor) -> Tensor:
    a, b = (x @ w).view(5, 2, 6).split(3)
    return rs(torch.cat([a, aten.constant_pad_nd(b, [0, 0, 0, 1])[:, :2].repeat(2, 1, 1)[:3]]))


def gathered_sequences(x: Tensor) -> Tensor:
    return torch.cat(ag(x).split(2), 1)


@case([AG], (2, 3, 8), W)
def the_last_row_of_each_sequence_cut_off(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = gathered_sequences(x)[:, :5].clone(memory_format=torch.contiguous_format).view(10, 8)
    return y @ w, y.sin()


@case([None], (2, 3, 8), W)
def the_last_row_of_each_sequence_cut_off_and_the_copy_written(x: Tensor, w: Tensor) -> Tensor:
    y = gathered_sequences(x)[:, :5].clone(memory_format=torch.contiguous_format).view(10, 8)
    y[3].mul_(2)
    return y @ w


CASES |= {
    "parts_of_which_the_last_is_padded": (lambda x, w: rs(in_parts(x @ w, 0, 1)), ((5, 8), W), [RS]),
    "parts_that_are_padded_by_as_many_rows_as_there_are_ranks": (
        lambda x, w: rs(in_parts(x @ w, 0, 2)),
        ((4, 8), W),
        [None],
    ),
    "padded_after_a_bias": (lambda x, w, v: rs(in_parts(torch.addmm(v, x, w), 0, 1)), ((5, 8), W, V), [None]),
    "the_last_row_of_a_batch_cut_off": (
        lambda x, w: ag(x[0]).view(1, 12, 8)[:, :11].view(11, 8) @ w,
        ((1, 6, 8), W),
        [AG],
    ),
    "as_many_rows_cut_off_as_there_are_ranks": (lambda x, w: ag(x)[:10] @ w, (X, W), [None]),
    "the_first_row_cut_off": (lambda x, w: ag(x)[1:] @ w, (X, W), [None]),
    "the_last_row_cut_off_and_contracted": (lambda x, w: ag(x)[:11].t() @ w, (X, (11, 6)), [None]),
    "parts_of_sequences_of_which_the_last_is_padded": (
        lambda x, w: rs(sequences(x @ w, 0, 1)),
        ((10, 8), W),
        [RS],
    ),
    "the_last_row_cut_off_with_others_between": (
        lambda x, w: ag(x)[:5].view(10, 8) @ w,
        ((3, 2, 8), W),
        [AG],
    ),
    "the_first_row_of_each_sequence_cut_off": (
        lambda x, w: gathered_sequences(x)[:, 1:].reshape(10, 8) @ w,
        ((2, 3, 8), W),
        [None],
    ),
    "as_many_of_each_sequence_cut_off_as_there_are_ranks": (
        lambda x, w: gathered_sequences(x)[:, :4].reshape(8, 8) @ w,
        ((2, 3, 8), W),
        [None],
    ),
}


def several_of_a_cut_one(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    y = ag(x)[:11]
    return y @ w, (y @ w.sin()).relu(), ag(x.cos())[:11] @ w


@pytest.mark.parametrize("name", [*(n for n, case in CASES.items() if case[2] != [None]), "several"])
def test_numbers_are_the_same_where_no_op_takes_the_product(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fn, shapes, _ = CASES.get(name, (several_of_a_cut_one, (X, W), []))

    def no_product(candidate: profitability.FusionCandidate) -> str | None:
        return "no product" if "matmul" in candidate.op else None

    monkeypatch.setattr(profitability, "why_not_profitable", no_product)
    seen = only(fn, *shapes, fusion=FusionPass())
    assert all("one_shot" in str(op) for op in seen.fused), seen.reasons


def calls(graph: fx.Graph) -> list[tuple[Any, list[Any]]]:
    """What each node calls, with which nodes, by number."""
    numbers = {n: i for i, n in enumerate(graph.nodes)}
    return [(n.target, [numbers[a] for a in n.all_input_nodes]) for n in graph.nodes if n.op != "placeholder"]


@pytest.mark.parametrize("name", CASES)
def test_numbers_are_the_same(name: str) -> None:
    fn, shapes, into = CASES[name]
    seen = only(fn, *shapes)
    assert seen.fused == into, seen.reasons
    if into == [None]:
        assert calls(seen.after) == calls(seen.before), "the graph has what it had"
