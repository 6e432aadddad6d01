"""How a report reads: which module, equal lines as one, the reasons counted, and why there is nothing to say."""

from __future__ import annotations

import json
import logging

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from graphs import AG, RS, applied, c10d, captured, copied, gather, scatter, traced
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch._inductor.virtualized import V
from torch.testing._internal.distributed.fake_pg import FakeStore
from weft.fused_ops.dispatch.plan import Plan
from weft.fused_ops.passes import Entry, FusionPass, Report
from weft.fused_ops.passes.agreement.fallback import compiling_fallback

pytestmark = pytest.mark.usefixtures("two")


class Gathers(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(gather(x), self.weight)


class Scatters(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return scatter(F.linear(x, self.weight))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = Gathers(8, 16, bias=False), Scatters(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).tanh()) + scatter(gather(x).sin())


class Blocks(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def test_entries_name_their_modules() -> None:
    forward, backward = captured(Blocks(2), torch.randn(4, 8))
    names = ["up (Gathers)", "down (Scatters)"]
    want = [f"layers.{i}.{name}" for i in range(2) for name in names]
    assert [e.module for e in forward.entries if e.fused_into] == want
    assert {e.module for e in forward.entries} == {*want, "layers.0 (Block)", "layers.1 (Block)"}
    assert {"layers.0.down (Scatters)", "layers.1.up (Gathers)"} <= {e.module for e in backward.entries}


def test_equal_lines_are_one() -> None:
    fusion = FusionPass(agree=False, collectives=False)
    forward, _ = captured(Blocks(3), torch.randn(4, 8), fusion=fusion)
    count = len(forward.entries)
    lines = Report(forward.entries).details().splitlines()
    fused = [line for line in lines if AG in line]
    assert len(fused) == 1
    assert fused[0].startswith(
        "graph 0: all_gather_into_tensor over group '0' in layers.0-2.up (Gathers): fused into"
    )
    assert fused[0].endswith("(3 times)")
    assert sum(RS in line for line in lines) == 1
    at = lines.index(f"6 of {count} collectives fused: 6 with a matmul")
    assert lines[at + 1] == "left alone:"
    assert [line.split(None, 1)[0] for line in lines[at + 2 :]] == ["3"] * len(lines[at + 2 :])
    assert lines[at + 2].endswith("its input is sin (sin.default), not a matrix product")


def entry(i: int, module: str, **given: object) -> Entry:
    return Entry(0, f"all_reduce_{i}", "all_reduce", "0", module=module, **given)  # type: ignore[arg-type]


def test_numbers_of_modules_are_ranges() -> None:
    reason = "its input is {} (sum.dim_IntList), not a matrix product"
    entries = [
        entry(i, f"layers.{i}.mlp (MLP)", reason=reason.format(f"sum_{i}" if i else "sum"))
        for i in (0, 1, 2, 5, 7, 8)
    ]
    line, *_, count = Report(entries).details().splitlines()
    assert line.startswith(
        "graph 0: all_reduce over group '0' in layers.0-2,5,7-8.mlp (MLP): left alone: its input"
    )
    assert line.endswith("(6 times)")
    assert count == "    6  its input is sum (sum.dim_IntList), not a matrix product"


def test_what_differs_in_more_than_numbers_is_told_apart() -> None:
    entries = [
        entry(0, "layers.0.a (Linear)", reason="its input has 7 rows"),
        entry(1, "layers.1.a (Linear)", reason="its input has 9 rows"),
        entry(2, "layers.2.b (Linear)", reason="its input has 9 rows"),
        entry(3, "layers.3.b (Norm)", reason="its input has 9 rows"),
    ]
    text = Report(entries).details()
    assert text.splitlines()[:4] == [str(e) for e in entries]
    assert text.splitlines()[-2:] == ["    3  its input has 9 rows", "    1  its input has 7 rows"]


def test_graphs_that_are_alike() -> None:
    """As of layers that are compiled one by one."""
    entries = [Entry(g, "all_reduce", "all_reduce", "0", reason="because") for g in (0, 1, 3)]
    assert Report(entries).details().splitlines()[0] == (
        "graphs 0-1,3: all_reduce over group '0': left alone: because (3 times)"
    )


def test_the_table_has_a_row_for_each_kind_of_layer() -> None:
    """What it saves only where there are GPUs; what could be set, and what can be done about what is left."""
    planned = Plan("push", predicted_us=20.0)
    same = {"dim": 0, "m": 8, "n": 4, "k": 2, "gain": 1.5, "nbytes": 3 << 20}
    entries = [
        *(entry(i, f"layers.{i}.up", fused_into=AG, plan=planned, **same) for i in range(3)),
        entry(
            3, "layers.0.down", fused_into="weft::one_shot_all_reduce", form="product → all_reduce", **same
        ),
        entry(4, "norm", fused_into="weft::fused_all_reduce_rms_norm"),
        entry(5, "head", reason="its input is torch.float64, not float32, bfloat16 or float16"),
        entry(6, "head", fused_into=AG, unfused=True),
    ]
    report = Report(entries)
    lines = [" ".join(line.split()) for line in str(report).splitlines()]
    assert lines[:7] == [
        "in collective times each became saves",
        "layers.0-2.up all_reduce 3 3 MiB fused_all_gather_matmul 4.5 us",
        "layers.0.down all_reduce 1 3 MiB one_shot_all_reduce",
        "norm all_reduce 1 fused_all_reduce_rms_norm",
        "head all_reduce 1 left alone",
        "head all_reduce 1 fused_all_gather_matmul (unfused)",
        "",
    ]
    told = [
        "5 of 7 collectives fused: 3 with a matmul, 1 exchanged for weft's, 1 with a norm;",
        "1 more are in graphs that ran unfused each time",
        "1 all-reduce follows a matmul, fused with none: FusionPass(sequence_parallel=True)",
        "makes reduce-scatters and all-gathers of them, which are fused with matmuls",
        "left alone:",
        "1 its input is torch.float64, not float32, bfloat16 or float16",
        "to do: cast to one of these before the collective",
    ]
    assert " ".join(lines[7:]) == " ".join(told) and max(map(len, str(report).splitlines())) <= 120
    assert json.loads(report.to_json())["entries"][5]["reason"] == entries[5].reason
    assert str(report).startswith(f"{report.table()}\n\n") and report.table().count("\n") == 5
    page = report.to_html()
    assert page.count("<tr>") == 6 and "layers.0-2.up" in page and "product → all_reduce" in page


def test_left_alone_keeps_the_module() -> None:
    assert entry(0, "mlp (MLP)", fused_into=AG).left_alone("because").module == "mlp (MLP)"


def test_a_coalesced_collective_keeps_its_module() -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            ys = c10d.all_gather_into_tensor_coalesced([x, x + 1], 2, "0")
            return tuple(c10d.wait_tensor(y) @ w for y in ys)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.both = Both()

        def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
            return self.both(x, w)  # type: ignore[no-any-return]

    (seen,) = captured(Model(), torch.randn(4, 8), torch.randn(8, 6))
    assert [(e.fused_into, e.module) for e in seen.entries] == [(AG, "both (Both)")] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_the_first_rank_of_a_group_logs(caplog: pytest.LogCaptureFixture, rank: int) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", rank=rank, world_size=2, store=FakeStore())
    with caplog.at_level(logging.DEBUG, "weft.passes"):
        captured(lambda x, w: gather(x) @ w, torch.randn(4, 8), torch.randn(8, 6))
    (record,) = [r for r in caplog.records if r.name == "weft.passes"]
    assert record.levelno == (logging.DEBUG if rank else logging.INFO)


# Why there are no entries.


def test_a_pass_that_has_not_run() -> None:
    fusion = FusionPass()
    said = fusion.report().details()
    assert said.startswith("no collectives were seen: the pass has not run: ") and "cache" not in said
    fn = torch.compile(lambda x, w: gather(x) @ w, options=fusion.options, backend="inductor")
    del fn  # never called
    assert fusion.report().runs.graphs == 0 and fusion.report().details() == said


def test_graphs_without_collectives() -> None:
    fusion = FusionPass()
    for _ in range(3):
        captured(torch.sin, torch.randn(3), fusion=fusion)
    assert fusion.report().details() == (
        "no collectives were seen: the pass ran on 3 graphs, none of which has a functional collective"
    )
    fusion.clear()
    assert "the pass has not run" in fusion.report().details()


@torch.library.custom_op("weft_tests::summed", mutates_args=())
def summed(x: Tensor) -> Tensor:
    return x.clone()


summed.register_fake(torch.empty_like)


def test_collectives_of_the_users_own_are_named() -> None:
    fusion = FusionPass()
    captured(
        lambda x, w: torch.ops.weft_tests.summed(x @ w), torch.randn(4, 8), torch.randn(8, 6), fusion=fusion
    )
    assert fusion.report().details() == (
        "no collectives were seen: the pass ran on one graph, which has no functional collective "
        "(custom ops: weft_tests::summed)"
    )


def test_a_key_without_a_run_is_the_cache() -> None:
    fusion = FusionPass()
    fusion.uuid()
    assert "Inductor asked for the pass's key but did not run it" in fusion.report().details()
    assert "came from its cache, and have no functional collective" in fusion.report().details()


def test_a_fallback_graphs_compilation_does_not_count() -> None:
    fusion = FusionPass()
    with compiling_fallback():
        fusion.uuid()
        fusion(traced(torch.sin, torch.randn(3)))
    assert (fusion.report().runs.keys, fusion.report().runs.graphs) == (0, 0)


# Graphs that were cut at a collective.


@pytest.mark.parametrize("dim", [0, 1])
def test_a_graph_that_ends_after_its_gather(dim: int) -> None:
    (seen,) = captured(lambda x: gather(x, dim), torch.randn(4, 8))
    assert seen.reasons.startswith("the graph ends after the collective: no matrix product takes")
    assert "compile the module that holds both" in seen.reasons


def test_a_graph_that_ends_elsewhere() -> None:
    (seen,) = captured(lambda x: gather(x).sin(), torch.randn(4, 8))
    assert "the graph ends" not in seen.reasons


@pytest.mark.parametrize("fn", [scatter, lambda x: scatter(x, 1), lambda x: late(x.t().reshape(-1, 2))])
def test_a_graph_that_begins_before_its_reduction(fn: object) -> None:
    (seen,) = captured(fn, torch.randn(4, 8))  # type: ignore[arg-type]
    assert seen.reasons.startswith("the graph begins before the collective: its input is ")
    assert "compile the module that holds both" in seen.reasons
    (seen,) = captured(lambda x: fn(x.sin()), torch.randn(4, 8))  # type: ignore[operator]
    assert "the graph begins" not in seen.reasons


def late(x: Tensor) -> tuple[Tensor, Tensor]:
    """An all-reduce that is waited for later."""
    pending = c10d.all_reduce(x, "sum", "0")
    y = x.cos()
    return y, c10d.wait_tensor(pending)


def test_a_sequential_that_is_compiled_itself() -> None:
    """Its children have a graph each."""
    fusion = FusionPass(agree=False, collectives=False)

    class Gather(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return gather(x)

    class Scatter(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return scatter(x)

    model = nn.Sequential(Gather(), nn.Linear(8, 8, bias=False), Scatter())
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False), torch.no_grad():
        model.compile(options=fusion.options)
        model(torch.randn(4, 8))
        both = FusionPass(agree=False)

        class Holder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(*model)

            def forward(self, x: Tensor) -> Tensor:
                return self.inner(x)

        torch.compile(Holder(), options=both.options)(torch.randn(4, 8))
    assert both.report().fused > 0
    entries = fusion.report().entries
    if entries and entries[0].graph != entries[-1].graph:  # as long as torch cuts it
        assert [e.reason.split(":")[0] for e in entries] == [
            "the graph ends after the collective",
            "the graph begins before the collective",
        ]
        assert all(e.source for e in entries)


# The C++ wrapper.


def test_the_cpp_wrapper_gets_no_op_that_returns_a_list() -> None:
    def gathered(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, "0")) @ w

    def scattered(x: Tensor, w: Tensor) -> Tensor:
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(x @ w, "sum", 2, "0"))

    x, w = torch.randn(4, 8), torch.randn(8, 6)
    with inductor_config.patch(cpp_wrapper=True):
        seen = applied(traced(gathered, x, w))
        assert seen.fused == [None]
        assert "the C++ wrapper cannot call an op that returns a list of tensors" in seen.reasons
        assert str(seen.after) == str(copied(seen.before))
        assert applied(traced(scattered, x, w)).fused == [RS]
        with V.set_aot_compilation(True):  # AOTInductor's C++ can
            assert applied(traced(gathered, x, w)).fused == [AG]
    assert applied(traced(gathered, x, w)).fused == [AG]
