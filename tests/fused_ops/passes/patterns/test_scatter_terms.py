"""What is added to a reduce-scatter's result: a bias and a residual that the op adds, and near misses, which stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from graphs import AG, RS, applied, c10d, captured, check_same, gather, scatter, traced
from spelled import Fn, Shape, additions, aten, group, only, rs, scattering, taken, wait
from torch import Tensor

# Operands, a bias and a residual of one of two ranks.
X, W, B, R = (12, 8), (8, 6), (6,), (6, 6)
RESIDUAL, BOTH = {"residual"}, {"bias", "residual"}


def after_two_reshapes(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    y = rs(x @ w).unsqueeze(0) + b
    return (y.view(3, -1, 6) + r).view(-1)


def of_columns(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return r + (scatter(x @ w, x.dim() - 1) + b)


def of_some_heads(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """[batch, sequence, heads, size]: columns of the product."""
    return scatter((x @ w).unflatten(-1, (6, 2)), 2) + r


def computed_in_between(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
    return rs(x @ w).view(r.shape) + b.sin() + r.cos()


# The function, the shapes of its inputs for one of two ranks, what the op adds.
FORMS: dict[str, tuple[Fn, tuple[Shape, ...], set[str]]] = {
    "residual": (lambda x, w, r: rs(x @ w) + r, (X, W, R), RESIDUAL),
    "residual on the left": (lambda x, w, r: r + rs(x @ w), (X, W, R), RESIDUAL),
    "bias": (lambda x, w, b: rs(x @ w) + b, (X, W, B), {"bias"}),
    "bias of two dimensions": (lambda x, w, b: rs(x @ w) + b, (X, W, (1, 6)), {"bias"}),
    "bias, then residual": (lambda x, w, b, r: r + (rs(x @ w) + b), (X, W, B, R), BOTH),
    "residual, then bias": (lambda x, w, b, r: rs(x @ w) + r + b, (X, W, B, R), BOTH),
    "average": (lambda x, w, r: rs(x @ w, "avg") + r, (X, W, R), RESIDUAL),
    "sum of products": (lambda x, w, r: rs(x @ w + x.sin() @ w) + r, (X, W, R), RESIDUAL),
    "all as one dimension": (lambda x, w, r: rs((x @ w).view(-1)) + r, (X, W, (36,)), RESIDUAL),
    "seen as a batch": (lambda x, w, r: rs(x @ w).view(2, -1, 6) + r, (X, W, (2, 3, 6)), RESIDUAL),
    "after two reshapes": (after_two_reshapes, (X, W, B, (3, 2, 6)), BOTH),
    "one row": (lambda x, w, r: rs(x @ w) + r, ((2, 8), W, (1, 6)), RESIDUAL),
    "one row and a bias": (lambda x, w, b: rs(x @ w) + b, ((2, 8), W, B), {"bias"}),
    "dimension 1": (lambda x, w, r: scatter(x @ w, 1) + r, ((3, 4, 8), W, (3, 2, 6)), RESIDUAL),
    "dimension 2 of 4": (
        lambda x, w, b, r: scatter(x @ w, 2) + b + r,
        ((2, 3, 4, 8), W, B, (2, 3, 2, 6)),
        BOTH,
    ),
    "columns": (of_columns, ((5, 8), (8, 12), B, (5, 6)), BOTH),
    "columns of a batch": (of_columns, ((2, 5, 8), (8, 12), B, (2, 5, 6)), BOTH),
    "some of the heads": (of_some_heads, ((2, 4, 8), (8, 12), (2, 4, 3, 2)), RESIDUAL),
    "computed in between": (computed_in_between, (X, W, B, (1, 6, 6)), BOTH),
    "the own product's": (lambda x, w: rs(x @ w) + (x.sin() @ w)[: 12 // 2], (X, W), RESIDUAL),
    "no rows": (lambda x, w, r: rs(x @ w) + r, ((0, 8), W, (0, 6)), RESIDUAL),
}


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("name", FORMS)
def test_added_by_the_op(name: str) -> None:
    fn, shapes, terms = FORMS[name]
    seen = only(fn, *shapes)
    assert (seen.fused, taken(seen)) == ([RS], [terms]), seen.reasons
    assert additions(seen.after) == 0 or name == "sum of products"
    (entry,) = seen.entries
    assert entry.form.endswith("→ add") and entry.form.count("→ add") == len(terms)
    assert entry.detail.endswith(f", {' and '.join(sorted(terms))} added")


def feed_forward(x: Tensor, a: Tensor, b: Tensor, bias: Tensor) -> Tensor:
    return x + (scatter(F.linear(gather(x, 1) @ a, b), 1) + bias)


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_layer_in_training(dynamic: bool) -> None:
    """Forward the residual and the bias; backward the residual's gradient, which the layer's is added to."""
    shapes = ((2, 6, 8), (8, 12), (8, 12), (8,))
    inputs = [torch.randn(s, requires_grad=True) for s in shapes]
    if dynamic:
        torch._dynamo.mark_dynamic(inputs[0], 1)
    forward, backward = captured(feed_forward, *inputs, dynamic=dynamic)
    assert forward.fused == [AG, RS], forward.reasons
    assert taken(forward) == [BOTH]
    assert backward.fused == [AG, RS], backward.reasons
    assert taken(backward) == [RESIDUAL]
    for seen in (forward, backward):
        assert additions(seen.after) == 0
        check_same(seen, 2)


@pytest.mark.usefixtures("two")
def test_two_reductions_in_one_sum() -> None:
    """The second adds what the first gives: they stay in their order."""
    seen = only(lambda x, w: rs(x @ w) + rs(x.sin() @ w), X, W)
    assert taken(seen) == [set(), RESIDUAL]
    first, second = (
        n for n in seen.after.nodes if n.target is torch.ops.weft.fused_matmul_reduce_scatter.default
    )
    assert second.kwargs["residual"] is first


@pytest.mark.usefixtures("two")
def test_a_third_term_stays() -> None:
    seen = only(lambda x, w, b, r: (rs(x @ w) + b + r + r.sin(), r), X, W, B, R)
    assert (taken(seen), additions(seen.after)) == ([BOTH], 1)
    seen = only(lambda x, w, b: rs(x @ w) + b + b.sin(), X, W, B)
    assert (taken(seen), additions(seen.after)) == ([{"bias"}], 1)


@pytest.mark.usefixtures("two")
def test_a_write_before_or_after_both_does_no_harm() -> None:
    def before(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
        r.mul_(2)
        return rs(x @ w) + r

    def after(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = rs(x @ w) + r
        r.mul_(2)
        return y.add_(1), r

    for fn in (before, after):
        assert taken(only(fn, X, W, R)) == [RESIDUAL]


@pytest.mark.usefixtures("two")
def test_no_collective_is_overtaken() -> None:
    """The op could wait for the residual only after another collective: it stays where the reduction was."""

    def fn(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = rs(x @ w)
        z = wait(c10d.all_reduce(r, "product", group()))
        return y + r.sin(), z

    def there_before(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        y = rs(x @ w)
        z = wait(c10d.all_reduce(r, "product", group()))
        return y + r, z

    for program, terms in ((fn, set()), (there_before, RESIDUAL)):
        seen = only(program, X, W, R)
        assert taken(seen) == [terms]
        names = [str(n.target) for n in seen.after.nodes if n.op == "call_function"]
        assert names.index("weft.fused_matmul_reduce_scatter.default") < names.index(
            "_c10d_functional.all_reduce.default"
        )


@pytest.mark.usefixtures("two")
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_dtypes(half: torch.dtype) -> None:
    def fn(product: torch.dtype, reduced: torch.dtype, summed: torch.dtype, added: torch.dtype) -> Fn:
        def program(x: Tensor, w: Tensor, b: Tensor, r: Tensor) -> Tensor:
            y = rs((x.to(product) @ w.to(product)).to(reduced)).to(summed)
            return y + b.to(added) + r.to(added)

        return program

    wide = torch.float32
    assert taken(only(fn(half, half, half, half), X, W, B, R)) == [BOTH]
    for dtypes in (
        (half, half, half, wide),  # the sum becomes float32
        (half, half, wide, wide),  # is cast in between
        (half, wide, wide, wide),  # is float32, where the op adds what is like its operands
        (half, wide, wide, half),
        (wide, wide, wide, half),
        (wide, wide, half, half),
    ):
        seen = only(fn(*dtypes), X, W, B, R)
        assert (seen.fused, taken(seen), additions(seen.after)) == ([RS], [set()], 2), dtypes


@pytest.mark.usefixtures("two")
def test_of_coalesced_ones() -> None:
    def fn(x: Tensor, w: Tensor, u: Tensor, r: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        both = c10d.reduce_scatter_tensor_coalesced([x @ w, x @ u], "sum", 2, group())
        y, z = map(wait, both)
        return y + r, z + b

    seen = only(fn, X, W, (8, 5), R, (5,))
    assert taken(seen) == [RESIDUAL, {"bias"}]


@pytest.mark.usefixtures("two")
def test_sizes_of_what_is_pending() -> None:
    """They may be read before the residual is there, and the op be where that is: what is sent has them, too."""
    for early in (False, True):

        def fn(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
            y = rs(x @ w)
            return y + (r if early else r.sin())  # noqa: B023

        graph = traced(fn, *map(torch.randn, (X, W, R)))
        (pending,) = graph.find_nodes(op="call_function", target=c10d.reduce_scatter_tensor.default)
        with graph.inserting_after(pending):
            size = graph.call_function(aten.sym_size.int, (pending, 0))
        size.meta["val"] = 6
        graph.output_node().args = ((graph.output_node().args[0], size),)
        seen = applied(graph)
        assert taken(seen) == [RESIDUAL]
        check_same(seen, 2)


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
