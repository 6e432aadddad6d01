"""What a graph keeps to be able to run unfused, and what is left alone because it could not."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from graphs import AG, c10d, captured, copied, fake_ranks, gather, hint, scatter, traced
from torch import Tensor, fx
from torch._inductor import compile_fx
from torch._inductor import config as inductor_config
from torch.utils.checkpoint import checkpoint
from weft.fused_ops.passes import Entry, FusionPass
from weft.fused_ops.passes.agreement import fallback, fallback_graph
from weft.fused_ops.passes.agreement.fallback import compiling_fallback
from weft.fused_ops.passes.agreement.guard import SIZES, GraphGuard
from weft.fused_ops.passes.agreement.votes.begun import uncounting_backend


@pytest.fixture(autouse=True)
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A group that looks as if there were other ranks to be asked."""
    with fake_ranks(2) as name:
        monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: None)
        yield name


def program(x: Tensor, w: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")) @ w


X, W = torch.randn(6, 8), torch.randn(8, 5)


def with_constant(constant: Tensor) -> fx.GraphModule:
    graph = traced(lambda x, w, c: (program(x, w) * c,), X, W, constant)
    module = fx.GraphModule({}, graph)
    module.register_buffer("constant", constant)
    old = [n for n in module.graph.nodes if n.op == "placeholder"][-1]
    with module.graph.inserting_before(old):
        new = module.graph.get_attr("constant")
    new.meta = old.meta
    old.replace_all_uses_with(new)
    module.graph.erase_node(old)
    return module


def questions(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.target is torch.ops.weft.agree.default]


def passed(graph: fx.Graph, **options: Any) -> tuple[list[str], fx.Graph]:
    """The reasons, and the graph after the pass."""
    fusion, after = FusionPass(**options), copied(graph)
    after.owning_module = graph.owning_module
    fusion(after)
    return [e.reason for e in fusion.report().entries], after


def test_the_question_comes_first_and_holds_the_graph() -> None:
    graph = traced(program, X, W)
    _, after = passed(graph)
    (question,) = questions(after)
    assert question.prev.op == "placeholder"
    assert question.args[1] is True
    after.eliminate_dead_code()
    assert questions(after)
    choice = GraphGuard(str(question.args[0]))
    code = str(choice._original.module.graph)
    assert "all_gather_into_tensor" in code
    assert "weft" not in code


def test_the_kept_graph_runs(group: str) -> None:
    module = with_constant(torch.randn(5))
    _, after = passed(module.graph)
    (question,) = questions(after)
    choice = GraphGuard(str(question.args[0]))
    for _ in range(4):
        args = [X, W]
        # The fake group gathers nothing, so only what is done with it can be compared.
        (out,) = choice.fallback(args, [(1, 12)])
        assert args == []
        assert out.shape == (12, 5)
        assert out.stride() == (1, 12)


@pytest.mark.parametrize("fn", [math.ceil, abs, round])
def test_the_kept_graph_has_what_sizes_are_made_with(fn: Any) -> None:
    graph = traced(program, X, W)
    out = graph.output_node()
    with graph.inserting_before(out):
        size = graph.call_function(fn, (7.5,))
    out.args = ([out.args[0], size],)
    (question,) = questions(passed(graph)[1])
    assert GraphGuard(str(question.args[0])).fallback([X, W], [None, None])[1] == fn(7.5)


def own(x: Tensor) -> Tensor:
    return x


def test_a_function_that_is_not_to_be_imported() -> None:
    graph = traced(program, X, W)
    (multiplied,) = (n for n in graph.nodes if n.target is torch.ops.aten.mm.default)
    for fn in (own, lambda x: x):
        after = copied(graph)
        (out,) = (n for n in after.nodes if n.op == "output")
        with after.inserting_before(out):
            node = after.call_function(fn, (out.args[0],))
        node.meta = dict(multiplied.meta)
        out.args = (node,)
        if fn is own:
            assert passed(after)[0] == [""]
        else:
            check_left(after, "uses <lambda>, which cannot be kept for ranks that do not agree")


def test_a_kept_graph_that_cannot_be_compiled_runs_op_by_op(caplog: pytest.LogCaptureFixture) -> None:
    _, after = passed(with_constant(torch.randn(5)).graph)
    (question,) = questions(after)
    choice = GraphGuard(str(question.args[0]))

    with mock.patch.object(compile_fx, "compile_fx_inner", side_effect=RuntimeError("no")):
        for _ in range(4):
            assert choice.fallback([X, W], [(1, 12)])[0].shape == (12, 5)
    assert sum("cannot be compiled as it was" in r.getMessage() for r in caplog.records) == 1


@pytest.mark.parametrize("stance", ["default", "fail_on_recompile"])
def test_the_way_out_is_compiled_without_the_pass(stance: str) -> None:
    """Where Inductor's settings name it, and not the options of one torch.compile, and when the program is warm."""
    _, after = passed(traced(lambda x, w: (program(x, w),), X, W))
    (question,) = questions(after)
    choice, fusion = GraphGuard(str(question.args[0])), FusionPass(strict=True)
    torch._dynamo.reset()
    with inductor_config.patch({**fusion.options, "fx_graph_cache": False}):
        for _ in range(4):
            with torch.compiler.set_stance(stance):
                assert choice.fallback([X, W], [(5, 1)])[0].shape == (12, 5)
    torch._dynamo.reset()
    assert [callable(run) for run in choice._original._runs.values()] == [True]
    assert not fusion.report().entries


def test_the_cache_does_not_take_a_way_out_for_the_graph() -> None:
    fusion = FusionPass()
    known = fusion.uuid()
    with compiling_fallback():
        assert fusion.uuid() != known
    assert fusion.uuid() == known


def test_what_was_taken_apart_counts_as_fused() -> None:
    """Other ranks run it coalesced: this one may run its graph only where they run the same."""

    def fn(x: Tensor, y: Tensor) -> list[Tensor]:
        return [c10d.wait_tensor(g) for g in c10d.all_gather_into_tensor_coalesced([x, y], 2, "0")]

    before, after = traced(fn, X, X), traced(lambda x, y: [gathered(x), gathered(y)], X, X)
    original = fallback_graph.FallbackGraph(before, [n for n in before.nodes if "coalesced" in n.name])
    entries = [
        Entry(0, n.name, "all_gather_into_tensor", "0")
        for n in after.nodes
        if n.target is c10d.all_gather_into_tensor.default
    ]
    original.ask_first(after, entries, [])
    (question,) = questions(after)
    guard = GraphGuard(str(question.args[0]))
    assert question.args[1] is True and guard._groups[0].fused and not guard._unasked


def gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))


def test_inductor_is_told_of_every_op_that_communicates() -> None:
    """Else it does not keep them in the order of the graph."""
    from torch._inductor.lowering import lowerings
    from weft.fused_ops.library import inductor
    from weft.fused_ops.library.communicating import COMMUNICATING
    from weft.fused_ops.ops.op import LOCAL_OPS

    ops = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("weft::")}
    send_nothing = {"agree", "keep_order", "record", *LOCAL_OPS}
    assert {op.name() for op in COMMUNICATING} == ops - {f"weft::{name}" for name in send_nothing}
    assert all(lowerings[op].__module__ == inductor.__name__ for op in COMMUNICATING)


def test_a_graph_in_which_nothing_is_fused_asks_without_a_way_out() -> None:
    graph = traced(lambda x: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")).sin(), X)
    _, after = passed(graph, collectives=False)
    (question,) = questions(after)
    assert question.args[1] is False
    assert GraphGuard(str(question.args[0]))._original is None


def asked(fn: Any, *inputs: Tensor) -> GraphGuard:
    (question,) = questions(passed(traced(fn, *inputs))[1])
    return GraphGuard(str(question.args[0]))


def signature(fn: Any, *inputs: Tensor) -> str:
    return asked(fn, *inputs).name


def test_graphs_that_communicate_alike_have_equal_signatures() -> None:
    """What a rank does on its own, such as to take its part of a table, is its own affair."""
    name = signature(program, X, W)
    assert name == signature(program, torch.randn(4, 8), torch.randn(8, 3))
    assert name == signature(lambda x, w: program(x, w) + 7, X, W)


def test_what_is_posted_holds_sizes_and_order() -> None:
    posted = asked(program, X, W).signature(())
    assert posted == asked(program, X, W).signature(())
    assert posted != asked(program, torch.randn(4, 8), W).signature(())
    assert posted == asked(program, X, torch.randn(8, 3)).signature(()), "of its own columns"

    def scattered(order: tuple[int, ...]) -> Any:
        return lambda x, w: c10d.wait_tensor(
            c10d.reduce_scatter_tensor((x @ w).view(2, 3, 5).permute(order).reshape(6, 5), "sum", 2, "0")
        )

    orders = [asked(scattered(order), X, W).signature(()) for order in ((0, 1, 2), (0, 2, 1), (0, 1, 2))]
    assert orders[0] == orders[2] != orders[1]


def test_a_graph_for_any_size_posts_what_one_for_this_size_does() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        return gather(x) @ w

    (fixed,) = captured(fn, X, W, fusion=FusionPass())
    torch._dynamo.mark_dynamic(rows := X.clone(), 0)
    (free,) = captured(fn, rows, W, fusion=FusionPass(), dynamic=True)
    (question,), (other,) = questions(fixed.after), questions(free.after)
    sizes = other.meta[SIZES]
    assert sizes
    assert not question.meta[SIZES]
    posts = GraphGuard(str(question.args[0])), GraphGuard(str(other.args[0]))
    assert posts[0].signature(()) == posts[1].signature(tuple(hint(s) for s in sizes))
    assert posts[0].signature(()) != posts[1].signature(tuple(hint(s) + 1 for s in sizes))


@pytest.mark.parametrize("contracted", [False, True])
def test_sizes_that_depend_on_data(contracted: bool) -> None:
    """Of what is sent, ranks have as many elements without the pass, too; what they contract may differ."""

    def fn(x: Tensor, w: Tensor, kept: Tensor) -> Tensor:
        at = kept.nonzero().squeeze(-1)
        return scatter(x[:, at] @ w[at]) if contracted else gather(x[at]) @ w

    kept = torch.tensor([True, False, True, True, False, True, False, True])
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        (seen,) = captured(fn, torch.randn(8, 8), W, kept, fusion=FusionPass(), dynamic=True)
    assert seen.fused == [None if contracted else AG], seen.reasons
    assert contracted == ("depend on data, so ranks cannot know beforehand" in seen.reasons)


def test_other_graphs_have_other_signatures() -> None:
    names = [
        signature(program, X, W),
        signature(program, X.bfloat16(), W.bfloat16()),
        signature(lambda x, w: program(x, w) + program(x * 2, w), X, W),
        signature(
            lambda x, w: (program(x, w), c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0"))), X, W
        ),
        signature(lambda x, w: c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")) + w.sum(), X, W),
        signature(lambda x, w: c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w, "sum", 2, "0")), X, W),
        signature(lambda x, w: c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w, "avg", 2, "0")), X, W),
    ]
    assert len(set(names)) == len(names)


def test_no_question_without_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = traced(program, X, W)
    assert not questions(passed(graph, agree=False)[1])
    monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: "fake")
    assert not questions(passed(graph)[1])
    assert not questions(passed(traced(torch.sin, X))[1])


def check_left(graph: fx.Graph, reason: str, *, alone: str = "") -> None:
    """``alone``: how the reason begins for which it is left without the question, too."""
    before = str(graph)
    (why,), after = passed(graph)
    assert reason in why
    assert [n for n in after.nodes if n.target is c10d.all_gather_into_tensor.default]
    for note in [
        *questions(after),
        *after.find_nodes(op="call_function", target=torch.ops.weft.record.default),
    ]:
        after.erase_node(note)
    assert str(after) == before
    (why,), _ = passed(graph, agree=False)
    assert why.startswith(alone) and bool(why) is bool(alone)


def test_a_part_that_is_no_text() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = program(x, w)
        return torch._higher_order_ops.map(lambda t: t + 1, y)

    check_left(traced(fn, X, W), "map_impl, which cannot be kept for ranks that do not agree")


@pytest.mark.parametrize("recomputed", [False, True])
def test_dropout(recomputed: bool) -> None:
    """Recomputed, it is drawn in the backward graph again, from the same seed."""

    def layer(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.dropout((gather(x) @ w).sin(), 0.5)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return checkpoint(layer, x, w, use_reentrant=False) if recomputed else layer(x, w)

    forward, *_ = seen = captured(fn, X, W.clone().requires_grad_(), fusion=FusionPass())
    assert "inductor_random" in str(forward.before)
    if recomputed:
        assert [s.fused for s in seen] == [[AG], [AG]]
    else:
        assert forward.fused == [AG]


def test_many_constants(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fallback, "_CONSTANT_BYTES", 16)
    module = with_constant(torch.randn(5))
    check_left(module.graph, "20 bytes of constants")


@pytest.mark.parametrize(
    ("name", "words", "alone"),
    [
        ("cpp_wrapper", "the C++ wrapper", "the C++ wrapper cannot call an op that returns a list"),
        ("fx_wrapper", "the FX wrapper", ""),
    ],
)
def test_code_that_is_not_python(name: str, words: str, alone: str) -> None:
    with inductor_config.patch({name: True}):
        check_left(traced(program, X, W), f"{words} cannot ask the other ranks", alone=alone)


def test_lite_mode() -> None:
    """The question stays, as an op that tells the other ranks."""
    with inductor_config.patch(fallback_by_default=True):
        why = "torch._inductor.config.fallback_by_default and reorder_for_peak_memory are True, with which ranks"
        check_left(traced(program, X, W), why, alone=why)
    with inductor_config.patch(fallback_by_default=True, reorder_for_peak_memory=False):
        said = "with fallback_by_default (lite mode) Inductor runs each op as it is"
        check_left(traced(program, X, W), said)
        assert [q.args[1] for q in questions(passed(traced(program, X, W))[1])] == [False]


def test_a_backend_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert uncounting_backend(dist.group.WORLD) == "fake"
    monkeypatch.setattr(fallback_graph, "uncounting_backend", lambda group: "gloo")
    check_left(traced(program, X, W), "its backend 'gloo' does not count collectives")


def test_a_graph_that_is_captured_whole() -> None:
    """Inductor's CUDA graphs leave the question outside only where they are made of partitions."""
    with inductor_config.patch({"triton.cudagraphs": True, "graph_partition": False}):
        (reason,), after = passed(traced(program, X, W))
        assert reason.startswith("the graph is captured whole")
        assert not any(n.target is torch.ops.weft.fused_all_gather_matmul.default for n in after.nodes)
        assert passed(traced(program, X, W), agree="capture")[0] == [""]
        assert passed(traced(program, X, W), agree=False)[0] == [""]
    with inductor_config.patch({"triton.cudagraphs": True, "graph_partition": True}):
        assert passed(traced(program, X, W))[0] == [""]


def test_what_the_op_adds_is_part_of_the_question() -> None:
    """A rank that passes a residual, and one that passes a bias, run different graphs."""

    def adding(shape: tuple[int, ...]) -> GraphGuard:
        def fn(x: Tensor, w: Tensor, term: Tensor) -> Tensor:
            return c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w, "sum", 2, "0")) + term

        reasons, after = passed(traced(fn, X, W, torch.randn(shape)))
        assert reasons == [""]
        return GraphGuard(questions(after)[0].args[0])  # type: ignore[arg-type]

    names = [adding(shape).signature(()) for shape in ((3, 5), (5,), (3, 1), (3, 5))]
    assert len({*names}) == 3
    assert names[0] == names[3]
