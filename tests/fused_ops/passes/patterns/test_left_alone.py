"""What is left alone, and why: every near miss of a known form. The graph must not change at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from graphs import applied, c10d, fake_ranks, traced
from spelled import Fn, ag, ar, aten, check_left, gathering, group, only, rs, wait
from torch import Tensor
from torch._inductor import config as inductor_config
from weft.fused_ops.library import schema
from weft.fused_ops.passes import FusionPass
from weft.fused_ops.passes.graph import rewrite
from weft.fused_ops.passes.graph.nodes import LeftAlone

pytestmark = pytest.mark.usefixtures("two")
X3, X2, W8 = (2, 6, 8), (6, 8), (8, 5)
INTEGERS, OF_16 = torch.ones(6, 8, dtype=torch.int32), torch.randn(16, 5).bfloat16()
OF_FP8 = torch.randn(6, 8).to(torch.float8_e4m3fn)


def joined(parts: Sequence[Tensor], w: Tensor) -> Tensor:
    y = torch.cat(parts, 1)
    return y.reshape(-1, y.shape[-1]) @ w


def slices(*cuts: slice) -> Fn:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = ag(x)
        return joined([y[cut] for cut in cuts], w)

    return fn


def of_both(x: Tensor) -> Tensor:
    y = ag(x)
    return y @ y.t()


def written_while_it_travels(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = gathering(x)
    aten.copy_.default(x, x + 1)
    return wait(pending) @ w, x


def as_bfloat16(x: Tensor, w: Tensor) -> Tensor:
    """int32 and float32 seen so have twice the columns."""
    return ag(x).view(torch.bfloat16) @ w


GATHERS: dict[str, tuple[Any, ...]] = {
    "swapped shards": (lambda x, w: joined(ag(x).split(2)[::-1], w), "starts at 2, where 0 is next", X3, W8),
    "one shard twice": (lambda x, w: joined([ag(x).split(2)[0]] * 2, w), "starts at 0, where 2 is", X3, W8),
    "swapped slices": (slices(slice(2, 4), slice(0, 2)), "starts at 2, where 0 is next", X3, W8),
    "overlapping": (slices(slice(0, 2), slice(1, 3)), "starts at 1, where 2 is next", X3, W8),
    "with steps": (slices(slice(0, 4, 2), slice(1, 4, 2)), "no part of", X3, W8),
    "that end early": (slices(slice(0, 1), slice(1, 2)), "end at 2", X3, W8),
    "some of more parts": (lambda x, w: joined(ag(x).split(1)[:2], w), "end at 2", X3, W8),
    "of two tensors": (lambda x, z, w: joined([ag(x).split(2)[0], z], w), "no part of", X3, X3, W8),
    "trimmed rows": (lambda x, w: ag(x)[:10] @ w, "no matrix product takes", X2, W8),
    "trimmed columns": (lambda x, w: ag(x)[:, :7] @ w[:7], "no matrix product takes", X2, W8),
    "cast between": (lambda x, w: ag(x).double() @ w.double(), "another dtype or layout", X2, W8),
    "scaled by a tensor": (lambda x, w, s: (ag(x) * s) @ w, "no matrix product takes", X2, W8, ()),
    "the addend": (lambda x, a, b: torch.addmm(ag(x), a, b), "no matrix product takes", X2, (12, 3), (3, 8)),
    "both operands": (of_both, "depends on the gathered tensor", (4, 8)),
    # 12 x 8 as 3 x 32.
    "more rows": (lambda x, w: ag(x).reshape(3, 32) @ w, "3 x 32 cuts through", X2, (32, 5)),
    "scaled by zero": (lambda x, w, b: torch.addmm(b, ag(x), w, alpha=0), "scales", X2, W8, (5,)),
    "batched": (lambda x, w: torch.bmm(ag(x), w), "a batch of products with different", X3, (4, 8, 5)),
    "fp8 that is cast": (lambda x, w: ag(x).float() @ w, "twice as many bytes would be sent", OF_FP8, W8),
    "float64": (lambda x, w: ag(x).float() @ w, "is torch.float64", torch.randn(X2).double(), W8),
    "int32": (lambda x, w: ag(x).float() @ w, "is torch.int32", INTEGERS, W8),
    "bits of int32": (as_bfloat16, "its input is torch.int32", INTEGERS, OF_16),
    "bits of float32": (as_bfloat16, "no matrix product takes", X2, OF_16),
    "bits of float16": (as_bfloat16, "no matrix product takes", torch.randn(X2).half(), OF_16[:8]),
    "written between": (written_while_it_travels, "writes to memory before mm", X2, W8),
}


def product(x: Tensor, w: Tensor) -> Tensor:
    return (x.reshape(-1, 8) @ w).reshape(2, 6, 5)


def scattered_slices(*cuts: slice) -> Fn:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = product(x, w)
        return rs(torch.cat([y[:, cut] for cut in cuts]))

    return fn


def reduced_by(op: str) -> Fn:
    return lambda x, w: rs(x @ w, op)


def an_operand_is_written(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    aten.mul_.Scalar(w, 2)
    return rs(y)


def a_part_is_used(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    parts = product(x, w).split(3, 1)
    return rs(torch.cat(parts)), parts[1] * 2


def used_elsewhere(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    y = x @ w
    return rs(y), y


def of_columns(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return rs(torch.cat(torch.addmm(b, x, w).split(2, 1)))


def parts_cut_through_rows(x: Tensor, w: Tensor) -> Tensor:
    """3 x 6 x 4 moved to 3 x 4 x 6 and flattened: half of it is no half of a dimension."""
    return rs((x @ w).reshape(4, 3, 5).permute(1, 0, 2).reshape(12, 5))


def reordered(x: Tensor, w: Tensor, r: Tensor) -> Tensor:
    """The reason names what adds, and not what only reorders."""
    return rs(aten.permute.default(x @ w + r.clone().t(), [0, 1]))


ADDS = "adds r_1 (placeholder), not a"
# In float32, unrounded: the op would send bfloat16.
WIDE = torch.randn(X2).bfloat16(), torch.randn(W8).bfloat16()
SCATTERS: dict[str, tuple[Any, ...]] = {
    "operand written": (an_operand_is_written, "writes to memory between", X2, W8),
    **{op: (reduced_by(op), f"reduces by '{op}'", X2, W8) for op in ("max", "min", "product")},
    "swapped parts": (
        lambda x, w: rs(torch.cat(product(x, w).split(3, 1)[::-1])),
        *("starts at 3, where 0 is next", X3, W8),
    ),
    "swapped slices": (scattered_slices(slice(3, 6), slice(0, 3)), "starts at 3, where 0 is next", X3, W8),
    "half covered": (scattered_slices(slice(0, 1), slice(1, 2)), "end at 2", X3, W8),
    "part used alone": (a_part_is_used, "is also used by", X3, W8),
    # 3 rows of 8 as 6 of 4: half of them is one row and a half.
    "rows cut": (lambda x, w: rs((x @ w).reshape(6, 4)), "3 x 8 cuts through", (3, 5), (5, 8)),
    "half a row": (lambda x, w, b: rs((x @ w).view(12, 4) + b), "not added to the rows", X2, (8, 8), (4,)),
    "other shapes": (
        lambda x, w, u: rs((x @ w).reshape(12, 4) + x.reshape(12, 4) @ u),
        *("have different shapes", X2, (8, 8), (4, 4)),
    ),
    "no product": (lambda a, r: rs(a + r), f"{ADDS} matrix product", (6,), (6,)),
    "no product, broadcast": (lambda a, b: rs(a + b), "of another shape", (6, 1), (5,)),
    "flattened": (lambda x, w, r: rs((x @ w).reshape(-1) + r), ADDS, X2, W8, (30,)),
    "used elsewhere": (used_elsewhere, "is also used by the graph's output", X2, W8),
    "cast": (lambda x, w: rs((x @ w).half()), "twice as many bytes", X2, W8),
    "residual": (lambda x, w, r: rs(x @ w + r), ADDS, X2, W8, (6, 5)),
    "reordered": (reordered, f"add (add.Tensor) {ADDS}", X2, W8, (5, 6)),
    "infinity": (
        lambda x, w: rs(torch.add(x @ w, x @ w, alpha=float("inf"))),
        *("multiplies what it adds by inf", X2, W8),
    ),
    "column": (lambda x, w, b: rs(x @ w + b), "of another shape", X2, W8, (6, 1)),
    "bias of columns": (of_columns, "other columns", X2, (8, 4), (4,)),
    "permuted": (parts_cut_through_rows, "cuts through", (12, 8), W8),
    "batched": (lambda x, w: rs(torch.bmm(x, w)), "a batch of products", X3, (2, 8, 5)),
    "one row": (lambda x, w: rs(x @ w), "no multiple of 2 ranks", (1, 8), W8),
    "seven rows": (lambda x, w: rs(x @ w), "no multiple of 2 ranks", (7, 8), W8),
    "another dtype": (
        lambda x, w: rs(torch.mm(x, w, out_dtype=torch.float32)),
        *("another dtype than its operands", *WIDE),
    ),
    "another dtype, gathered": (
        lambda x, w: torch.mm(ag(x), w, out_dtype=torch.float32),
        *("mm.dtype): it has another dtype", *WIDE),
    ),
}


def coalesced(x: Tensor, w: Tensor) -> list[Tensor]:
    return [wait(c10d.all_gather_into_tensor_coalesced([x, x], 2, group())[0]) @ w]


def into_given_memory(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    return wait(c10d.all_gather_into_tensor_out(x, 2, group(), out=out)) @ w


def used_without_waiting(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    pending = gathering(x)
    return wait(pending) @ w, pending + 1


COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "another reduction": (lambda x: ar(x.sin(), "product"), "it reduces by 'product'", X2),
    "coalesced": (coalesced, "of which number 1: nobody waits for it", X2, W8),
    "nobody waits": (lambda x, w: gathering(x @ w), "nobody waits", X2, W8),
    "given memory": (into_given_memory, "writes into out_1 (placeholder), which others", X2, W8, (12, 8)),
    "used without waiting": (used_without_waiting, "used without waiting, by add", X2, W8),
    "number of ranks": (lambda x, w: ag(x, 4) @ w, "for 4 ranks, the group has 2", X2, W8),
}
ALL = {
    f"{kind}: {name}": case
    for kind, cases in (("gathers", GATHERS), ("scatters", SCATTERS), ("collectives", COLLECTIVES))
    for name, case in cases.items()
}


@pytest.mark.parametrize("name", ALL)
def test_left_alone(name: str) -> None:
    fn, reason, *given = ALL[name]
    check_left(fn, reason, *given)


def product_of_gathered(x: Tensor, w: Tensor) -> Tensor:
    return ag(x) @ w


def test_groups() -> None:
    graph = traced(product_of_gathered, torch.randn(X2), torch.randn(W8))
    (node,) = [n for n in graph.nodes if n.target is c10d.all_gather_into_tensor.default]
    node.args = (*node.args[:2], "nobody")
    assert "no process group is named 'nobody'" in applied(graph).reasons
    others = FusionPass(groups=["other"])
    check_left(product_of_gathered, "none of those this pass is for", X2, W8, fusion=others)
    torch.distributed.destroy_process_group()
    with fake_ranks(1):
        check_left(product_of_gathered, "has one rank", X2, W8)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())


def test_where_inductor_may_reorder_collectives() -> None:
    for setting, patched in (
        (
            "sink_waits_iterative_unsafe_collectives_reorder",
            {
                "reorder_for_compute_comm_overlap": True,
                "reorder_for_compute_comm_overlap_passes": ["sink_waits_iterative"],
            },
        ),
        ("enable_overlap_scheduling", {"aten_distributed_optimizations.enable_overlap_scheduling": True}),
    ):
        with inductor_config.patch(patched):
            check_left(product_of_gathered, f"{setting} is True", X2, W8)


def test_a_tensor_gathered_again_after_it_was_written() -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        first = ag(x) @ w
        aten.mul_.Scalar(x.view(-1), 2)
        return first, ag(x) @ w

    assert [e.detail for e in only(fn, X2, W8).entries] == ["1 product", "1 product"]


def test_what_an_op_does_not_take() -> None:
    """A form that is found where the op has no such sizes is left alone, with the op's words."""
    graph = traced(torch.mm, torch.randn(7, 8), torch.randn(W8))
    before, names = graph.output_node(), [n.name for n in graph.nodes]
    A, B = graph.find_nodes(op="placeholder")
    with pytest.raises(LeftAlone, match="A @ B has size 7 there, must be a multiple of 2 ranks"):
        rewrite.call(before, schema.matmul_reduce_scatter, A, B, "sum", 0, group())
    assert [n.name for n in graph.nodes] == names


def test_tensors_to_concatenate_are_a_list() -> None:
    """As tracers have them: Inductor of torch 2.11 takes no tuple."""
    graph = traced(lambda a, b: a + b, torch.randn(X2), torch.randn(X2))
    (a, b), out = graph.find_nodes(op="placeholder"), graph.output_node()
    whole = rewrite.call(out, aten.cat.default, (a, b), 1)
    assert isinstance(whole.args[0], list) and whole.meta["val"].shape == (6, 16)
