"""Near misses of what fused_matmul_reduce_scatter adds: the reduction is fused, the addition stays after it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from adding import B, Fn, R, Shape, W, X, additions, only, rs, scattering, taken, two, wait
from graphs import RS
from torch import Tensor

__all__ = ["two"]

# The function, the shapes of its inputs, what the op adds in spite of it.
LEFT: dict[str, tuple[Fn, tuple[Shape, ...], set[str]]] = {}


def left(*shapes: Shape, terms: set[str] | None = None) -> Callable[[Fn], Fn]:
    def enter(fn: Fn) -> Fn:
        LEFT[fn.__name__] = (fn, shapes, terms or set())
        return fn

    return enter


@left(X, W, R)
def the_sum_is_wanted_too(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = rs(x @ w)
    return y + r, y


@left(X, W, R)
def a_view_of_the_sum_is_wanted_too(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = rs(x @ w).view(2, 3, 6)
    return y + r.view(2, 3, 6), y.sin()


@left(X, W, R)
def what_is_pending_is_returned_too(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    pending = scattering(x @ w)
    return wait(pending) + r, pending


@left(X, W, B, R, terms={"bias"})
def the_sum_with_its_bias_is_wanted_too(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = rs(x @ w) + b
    return y + r, y.sin()


@left(X, W)
def added_to_itself(x: Tensor, w: Tensor) -> Tensor:
    y = rs(x @ w)
    return y + y


@left(X, W)
def computed_from_the_sum(x: Tensor, w: Tensor) -> Tensor:
    y = rs(x @ w)
    return y + y.sin()


@left(X, W, R)
def the_residual_is_written_before_it_is_added(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    y = rs(x @ w)
    r.mul_(2)
    return y + r, r


@left(X, W, R)
def the_residual_is_written_through_a_view(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    y = rs(x @ w)
    r.view(-1)[3:].mul_(2)
    return y + r


@left(X, W, R)
def an_operand_is_written_before_the_residual_is_there(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    y = rs(x @ w)
    x.mul_(2)
    return y + r.sin()


@left(X, W, B)
def the_bias_is_written_before_it_is_added(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    y = rs(x @ w)
    b.mul_(2)
    return y + b


LEFT |= {
    "the_residual_is_scaled": (lambda x, w, r: torch.add(rs(x @ w), r, alpha=2), (X, W, R), set()),
    "the_sum_is_scaled": (lambda x, w, r: torch.add(r, rs(x @ w), alpha=2), (X, W, R), set()),
    "subtracted": (lambda x, w, r: rs(x @ w) - r, (X, W, R), set()),
    "a_number_is_added": (lambda x, w: rs(x @ w) + 1.5, (X, W), set()),
    "a_tensor_of_one_number_is_added": (lambda x, w, r: rs(x @ w) + r, (X, W, ()), set()),
    "a_column_is_added": (lambda x, w, r: rs(x @ w) + r, (X, W, (6, 1)), set()),
    "the_sum_is_broadcast": (lambda x, w, r: rs(x @ w) + r, (X, W, (2, 6, 6)), set()),
    "the_bias_has_a_dimension_more": (lambda x, w, b: rs(x @ w) + b, (X, W, (1, 1, 6)), set()),
    "the_only_row_is_broadcast": (lambda x, w, r: rs(x @ w) + r, ((2, 8), W, R), set()),
    "the_residual_is_broadcast": (
        lambda x, w, r: rs(x @ w).view(3, 2, 6) + r,
        ((12, 8), W, (3, 1, 6)),
        set(),
    ),
    # It would be copied for the op.
    "an_expanded_residual": (lambda x, w, r: rs(x @ w) + r[:, None].expand(6, 6), (X, W, B), set()),
    # The same; and on the left of the sum, which gets its strides.
    "a_transposed_residual": (lambda x, w, r: r.t() + rs(x @ w), (X, W, R), set()),
    "after_a_permutation": (lambda x, w, r: rs(x @ w).t().contiguous() + r, (X, W, R), set()),
    "after_a_copy_with_other_strides": (
        lambda x, w, r: rs(x @ w).view(1, 2, 3, 6).clone(memory_format=torch.channels_last) + r,
        (X, W, (1, 2, 3, 6)),
        set(),
    ),
    # Scattered along dimension 1, which is moved to the front before, and stays there.
    "the_op_gives_another_order": (
        lambda x, w, r: rs((x @ w).movedim(1, 0).contiguous()) + r,
        ((3, 4, 8), W, (2, 3, 6)),
        set(),
    ),
    "a_vector_for_part_of_a_row": (lambda x, w, b: rs(x @ w).view(9, 4) + b, (X, W, (4,)), set()),
    "a_vector_for_two_rows": (lambda x, w, b: rs(x @ w).view(3, 12) + b, (X, W, (12,)), set()),
    "activated_before": (lambda x, w, r: rs(x @ w).relu() + r, (X, W, R), set()),
    "the_sum_is_written": (lambda x, w, r: rs(x @ w).add_(r), (X, W, R), set()),
    # Its sum is added after the op, and what follows in the same kernel.
    "each_rank_adds_a_vector_before": (lambda x, w, b, r: rs(x @ w + b) + r, (X, W, B, R), set()),
}


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", LEFT)
def test_stays_after_the_op(name: str) -> None:
    fn, shapes, terms = LEFT[name]
    seen = only(fn, *shapes)
    assert (seen.fused, taken(seen)) == ([RS], [terms]), seen.reasons
    assert seen.entries[0].form.count("→ add") == len(terms)
    assert additions(seen.after) == additions(seen.before) - len(terms)
