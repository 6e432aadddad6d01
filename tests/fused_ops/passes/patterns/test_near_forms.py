"""Programs written to break the pass: nearly a form that it knows, or a form with something beside it.

Casts that cut off, writes, aliases, strides, waits, several uses. Each is run before and after the pass: the same
numbers, strides and aliases, the same in what it writes to. Traced op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import AG, AR, RS, Cases, applied, check_same, traced
from spelled import ag, ar, aten, check_left, gathering, only, reducing, rs, scattering, seen_of, wait
from torch import Tensor
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.patterns import all_reduce

pytestmark = pytest.mark.usefixtures("two")
MM_AR = "weft::fused_matmul_all_reduce"
MM_AG = "weft::fused_matmul_all_gather"
X, W, V, R = (6, 8), (8, 6), (6,), (6, 6)
CASES = Cases()
case = CASES.case


@case([MM_AR, MM_AR], X, W, R)
def the_residual_is_written_before_the_second_sum(x: Tensor, w: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    a, b = reducing(x @ w), reducing(x.sin() @ w)
    t = r + wait(a)
    r.mul_(2)
    return t + wait(b), r


@case([AR, MM_AR], X, W)
def what_is_reduced_is_written_before_the_next_one(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = x @ w
    a = reducing(p)
    p.mul_(2)
    return wait(a) + ar(x.sin() @ w), p


@case([MM_AR, MM_AR], X, W)
def a_view_of_the_result_is_written(x: Tensor, w: Tensor) -> Tensor:
    a, b = reducing(x @ w), reducing(x.sin() @ w)
    y = wait(a)
    y.view(-1).mul_(3)
    return y + wait(b)


@case([AR, None], X, W)
def the_input_of_pending_ones_is_written(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    p, q = x @ w, x.sin() @ w
    a, b = reducing(p), scattering(q)
    p.zero_()
    q.zero_()
    return wait(a), wait(b), p, q


@case([None], X, W)
def a_product_is_written_through_a_view(x: Tensor, w: Tensor) -> Tensor:
    p = x @ w
    p.view(-1)[3:].mul_(2)
    return rs(p)


@case([None], X, W, V)
def a_bias_is_written_after_it_was_added(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    p = x @ w + v
    v.mul_(2)
    return rs(p), v


@case([None], X, W)
def added_in_place(x: Tensor, w: Tensor) -> Tensor:
    p = x @ w
    p += x.sin() @ w
    return rs(p)


@case([AG], X, W)
def written_between_two_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    g = ag(x)
    y = g @ w
    g.view(-1)[:8].mul_(2)
    return y, g @ w


@case([AG], X, W)
def a_weight_is_written_between_two_products(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    g = ag(x)
    y = g @ w
    w.mul_(2)
    return y, g @ w


@case([None], X, W)
def the_shard_is_written_while_it_travels(x: Tensor, w: Tensor) -> Tensor:
    pending = gathering(x)
    x.mul_(2)
    return wait(pending) @ w


@case([AG], X, W)
def gathered_returned_with_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = ag(x)
    y = g @ w
    return y, y, g, g.view(-1), g.view(4, 3, 8), g.clone()


@case([AG], X, (16, 5))
def joined_returned_with_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = ag(x)
    c = torch.cat(g.split(6), 1)
    return c @ w, g, c, c.view(-1), g.view(-1)


@case([AG], X, (12, 5))
def transposed_returned(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = ag(x)
    return w.t() @ g, g.t(), g


@case([AG], X, W)
def a_clone_returned_beside_views(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = ag(x)
    c = g.clone()
    return c @ w, c, c.clone(), g.view(4, 3, 8)


@case([None, AR], X, W)
def scattered_and_reduced(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    p = x @ w
    return rs(p), ar(p)


@case([MM_AR], X, W, V, R)
def a_norm_of_columns(x: Tensor, w: Tensor, v: Tensor, r: Tensor) -> Tensor:
    s = ar(x @ w) + r
    return s * torch.rsqrt(s.pow(2).mean(0, keepdim=True) + 1e-6) * v


@case([MM_AR], X, W, V, R)
def a_norms_weight_and_residual_are_written(x: Tensor, w: Tensor, v: Tensor, r: Tensor) -> tuple[Tensor, ...]:
    s = ar(x @ w) + r
    v[:3].mul_(2)  # through a view: the graph goes on with v
    r.mul_(2)
    return s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + 1e-6) * v, s, r


@case([AG, RS, MM_AR], X, W)
def pending_ones_waited_for_twice(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g, s, r = gathering(x), scattering(x @ w), reducing(x @ w)
    return wait(g).sum(), wait(g) @ w, wait(s) + 1, wait(s), wait(r) + 1, wait(r)


CASES |= {
    "the_result_is_written": (lambda x, w: rs(x @ w).add_(1), (X, W), [RS]),
    "reduced_with_other_strides": (
        lambda x, w: ar((x @ w).view(2, 3, 5).permute(1, 2, 0).contiguous()),
        (X, (8, 5)),
        [MM_AR],
    ),
    "added_to_a_transposed_one": (
        lambda x, w, r: r.t() + ar(x @ w) + ar(x.sin() @ w),
        (X, W, R),
        [MM_AR, MM_AR],
    ),
    "a_transposed_matrix_as_bias": (lambda x, w, b: torch.addmm(b.t(), ag(x), w), (X, W, (6, 12)), [AG]),
    "added_to_its_transpose": (lambda x, w: ar(x @ w) + ar((x.sin() @ w).t().contiguous()), (X, W), [AR, AR]),
    "subtracted": (lambda x, w: ar(x @ w) - ar(x.sin() @ w), (X, W), [MM_AR, MM_AR]),
    "a_quotient_scattered": (lambda x, w: rs(x @ w / (x.sin() @ w)), (X, W), [None]),
    "a_vector_on_the_columns_of_the_transpose": (
        lambda x, w, v: rs((x @ w).t().contiguous() + v),
        (X, W, V),
        [None],
    ),
    "a_vector_on_the_only_row": (lambda x, w, v: rs((x @ w + v).view(6, 1)), ((1, 8), W, V), [None]),
    "flipped": (lambda x, w: ag(x).flip(0) @ w, (X, W), [None]),
    "rolled_by_a_shard": (lambda x, w: torch.roll(ag(x), 6, 0) @ w, (X, W), [None]),
    "strides_read_otherwise": (lambda x, w: ag(x).as_strided((12, 8), (1, 12)) @ w, (X, W), [None]),
    "halves_of_two_gathers": (lambda x, w: torch.cat([ag(x)[:6], ag(x.sin())[6:]]) @ w, (X, W), [None, None]),
    "only_one_shard": (lambda x, w: ag(x).narrow(0, 6, 6) @ w, (X, W), [None]),
    "a_batch_with_one_matrix": (lambda x, w: torch.bmm(ag(x), w.expand(8, 8, 6)), ((4, 6, 8), W), [AG]),
    "a_batch_with_matrices_of_equal_rows": (
        lambda x, w: torch.bmm(ag(x), w.expand(8, 8, 6)),
        ((4, 6, 8), (8, 1, 6)),
        [None],
    ),
    "one_matrix_on_the_left": (
        lambda x, w: rs(torch.bmm(w.expand(4, 6, 8), x.transpose(1, 2))),
        ((4, 6, 8), (1, 6, 8)),
        [None],
    ),
    "rows_interleaved": (
        lambda x, w: rs((x @ w).reshape(2, 3, 6).transpose(0, 1).reshape(6, 6)),
        (X, W),
        [None],
    ),
    "padded_before_it_is_scattered": (
        lambda x, w: rs(aten.constant_pad_nd(x @ w, [0, 0, 0, 2])),
        ((4, 8), W),
        [None],
    ),
    "one_row_repeated": (lambda x, w: rs((x @ w)[:1].expand(4, 6).contiguous()), ((4, 8), W), [None]),
    "logits_gathered_along_the_vocabulary": (lambda x, w: torch.cat(ag(x @ w).split(6), 1), (X, W), [MM_AG]),
    "waited_for_once_more": (
        lambda x, w: (wait(ag(x)) @ w, wait(rs(x @ w)) + 1, wait(wait(ar(x @ w))) + 1),
        (X, W),
        [AG, RS, MM_AR],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_changes(name: str) -> None:
    fn, shapes, into = CASES[name]
    graph = traced(fn, *map(torch.randn, shapes))
    seen = applied(graph, FusionPass(fuse="always", agree=False, collectives=False))
    assert seen.fused == into, seen.reasons
    assert all(e.reason for e in seen.entries if e.fused_into is None)
    check_same(seen, 2)
    check_same(applied(graph), 2)
    waits = [n for n in seen.after.nodes if n.target is wait.default]
    assert len(waits) == into.count(None), "what is fused needs no wait: Inductor cannot make one"


@pytest.mark.parametrize(
    ("product", "between", "reduced", "right"),
    [
        (torch.float32, torch.int32, torch.float32, False),
        (torch.float32, torch.bool, torch.float32, False),
        (torch.float32, torch.bfloat16, torch.float32, False),
        (torch.bfloat16, torch.float16, torch.float32, False),
        (torch.bfloat16, torch.float8_e4m3fn, torch.bfloat16, False),
        (torch.bfloat16, torch.float32, torch.bfloat16, True),
    ],
    ids=str,
)
def test_what_a_cast_on_the_way_cuts_off_stays_off(
    product: torch.dtype, between: torch.dtype, reduced: torch.dtype, right: bool
) -> None:
    def cast(x: Tensor, w: Tensor) -> Tensor:
        return (x.to(product) @ w.to(product)).to(between).to(reduced)

    always = FusionPass(fuse="always", agree=False, collectives=False)
    inputs = torch.randn(X), torch.randn(W)
    for fn, op in ((rs, RS), (ar, MM_AR)):
        seen = seen_of(lambda x, w: fn(cast(x, w)), *inputs, fusion=always)  # noqa: B023
        rest = None if op == RS else AR  # all that is reduced in one shot is what was cast
        assert seen.fused == [op if right else rest], seen.reasons
        if op == RS and not right:
            assert f"is {between}, to which the op would not round" in seen.reasons
        if between is torch.int32:
            check_same(seen, 2)


def test_an_earlier_one_that_was_left_is_not_merged_across_a_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found from the later all-reduce; the earlier one was left alone, as neither is profitable by itself."""
    monkeypatch.setattr(all_reduce, "why_not_profitable", lambda *args, **kwargs: "does not pay")

    def fn(write: bool) -> Callable[..., Any]:
        def program(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            p = x @ w
            first = reducing(p)
            if write:
                p.mul_(2)
            second = ar(x.sin() @ w)
            return (x[:, :6] + second) + wait(first), p

        return program

    merged, apart = (only(fn(write), X, W) for write in (False, True))
    assert [e.detail.split(",")[0] for e in merged.entries] == [
        "2 all-reduces as one",
        "merged with all_reduce",
    ]
    assert apart.fused == [None, None]


def test_what_is_recomputed_with_a_generators_state_is_not_moved() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        g = ag(x)
        total = g.sum()
        _, mask = torch.ops.higher_order.run_and_save_rng_state(aten.bernoulli.default, w)
        return total, g @ (w * mask)

    check_left(fn, "which comes later", X, W)
