"""What Inductor makes of the order: what it could fuse or move stays where it belongs."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from memory_check.verified import verified
from ranks import run_ranks
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.backend import _with_pass
from weft.fused_ops.passes.keep_grouped import BEFORE_FUSION, KeepGrouped
from weft.fused_ops.passes.order.grouped import MARK

c10d = torch.ops._c10d_functional


def group() -> str:
    return dist.distributed_c10d._get_default_group().group_name


def gathered(x: Tensor) -> Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(x, dist.get_world_size(), group()))


def casts_beside_others(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """What else reads the second shard must not become part of its cast, for which the gather would wait."""
    x = x @ gathered(first.to(torch.bfloat16)).float().t()
    y = x @ gathered(second.to(torch.bfloat16)).float()
    return y, second * 2, gathered(x.square().sum(1)).float(), y.sum()


def writes_in_place(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """Nothing writes to the operand while it is read."""
    a = first * 2
    pending = c10d.all_reduce(a, "sum", group())
    y = x @ first.t()
    done = c10d.wait_tensor(pending)
    a.mul_(0.5)
    return done, y @ second, a


def views_of_parts(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
    """A collective in place inside of a larger tensor."""
    a = first + 1
    dist.all_reduce(a[1:3])
    y = x @ second.t()
    return y @ second, a.sin(), a[2:].cos()


PROGRAMS = {f.__name__: f for f in (casts_beside_others, writes_in_place, views_of_parts)}


def loops_of(code: str, kernel: str) -> str:
    """How many tensors a kernel writes, and in how many loops."""
    source = code.split(f"{kernel} = ", 1)[1].split("'''")[1]
    outputs = set(re.findall(r"\w+\* out_ptr\d", source))
    return f"{len(outputs)} in {source.count('for(int64_t x0=')} loops"


def compiled(rank: int, world: int) -> dict[str, list[str]]:
    found = {}
    torch.manual_seed(rank)
    given = torch.randn(66, 130), torch.randn(32, 130), torch.randn(32, 130)
    for name, fn in PROGRAMS.items():
        expected = fn(*given)
        torch._dynamo.reset()
        with torch.no_grad(), inductor_config.patch(fx_graph_cache=False):
            options = FusionPass([], reorder=4.0).options
            results, codes = run_and_get_code(torch.compile(fn, options=options), *given)
        for mine, theirs in zip(results, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)
        (code,) = codes
        calls = re.findall(
            r"^ +(?:buf\d+ = )?(?:extern_kernels|torch\.ops\._c10d_functional)\.(\w+)|^ +(cpp_fused\w*)\(",
            code,
            re.MULTILINE,
        )
        found[name] = [a or loops_of(code, b) for a, b in calls]
    return found


def test_what_stands_in_generated_code() -> None:
    for found in run_ranks(verified, 2, compiled):
        order = found["casts_beside_others"]
        starts = [i for i, name in enumerate(order) if name == "all_gather_into_tensor"][:2]
        # The casts stand before the gathers, and write nothing else; before the second what was gathered is cast.
        assert [order[i - 1] for i in starts] == ["1 in 1 loops", "2 in 2 loops"]
        assert order.index("mm") > starts[1]  # and the second gather is on its way beside the first product
        order = found["writes_in_place"]
        assert order.index("all_reduce_") < order.index("mm") < order.index("wait_tensor")
        order = found["views_of_parts"]
        assert order.index("all_reduce_") < order.index("mm") < order.index("wait_tensor")


def test_beside_streams_that_the_program_names_nothing_is_grouped() -> None:
    """Of such a graph Inductor's scheduler knows the streams of all nodes that it had at first, of groups none."""

    def at(stream: int | None, mark: Any) -> Any:
        origin = SimpleNamespace(meta={} if mark is None else {MARK: mark}, target=None)
        node = SimpleNamespace(origins=(origin,), get_stream_idx=lambda: stream)
        return SimpleNamespace(node=node)

    nodes = [at(None, (True, "gather")), at(None, (True, "gather")), at(3, None)]
    assert FusionPass(reorder=1.0).options[BEFORE_FUSION](nodes) == nodes


def test_passes_of_the_program_run_before() -> None:
    """What Inductor's configuration or the options have before it fuses stays, however often options are made."""
    seen: list[str] = []

    def named(name: str) -> Callable[[list[Any]], list[Any]]:
        def run(nodes: list[Any]) -> list[Any]:
            seen.append(name)
            return nodes[::-1]

        return run

    own, other = named("configuration"), named("options")
    own.passes = ("names", "of its own")  # type: ignore[attr-defined]
    fusion = FusionPass(reorder=1.0)
    with inductor_config.patch({BEFORE_FUSION: own}):
        options = fusion.options
        assert fusion.options[BEFORE_FUSION] is options[BEFORE_FUSION]
        with inductor_config.patch({BEFORE_FUSION: options[BEFORE_FUSION]}):
            assert fusion.options[BEFORE_FUSION] is options[BEFORE_FUSION]
        given = _with_pass(None, {BEFORE_FUSION: other}, fusion)
    nodes = [type("Node", (), {"node": None})() for _ in range(3)]
    assert options[BEFORE_FUSION](nodes) == given[BEFORE_FUSION](nodes) == nodes[::-1]
    assert seen == ["configuration", "options"]
    assert isinstance(fusion.options[BEFORE_FUSION], KeepGrouped)


def test_a_program_s_pass_runs_in_compiled_graphs() -> None:
    seen: list[int] = []

    def own(nodes: list[Any]) -> list[Any]:
        seen.append(len(nodes))
        return nodes

    x = torch.randn(5)
    with inductor_config.patch({BEFORE_FUSION: own, "fx_graph_cache": False}):
        torch._dynamo.reset()
        y = torch.compile(torch.abs, options=FusionPass(reorder=True).options)(x)
    assert torch.equal(y, x.abs()) and seen == [1]
