"""Generated code that verifies its memory, with buffers that are used again and in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from graphs import c10d, fake_ranks
from memory_check.code_watch import CodeWatch
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code


class _Watched(CustomGraphPass):
    """The verifier alone, without what interprets the graph first."""

    def __call__(self, graph: fx.Graph) -> None:
        from memory_check.watched_code import watch_code

        watch_code(graph)

    def uuid(self) -> Any:
        return None


def chain(x: Tensor, y: Tensor) -> Tensor:
    for _ in range(3):
        x = (x @ y).relu() @ y.t()
    return x


def joined(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    a = torch.cat([x @ y, (x @ y).sin(), torch.stack([x.sum(0), x.mean(0)]) @ y])
    return a.t() @ a, (a * 2).sum(0)


def written(x: Tensor, y: Tensor) -> Tensor:
    a = x @ y
    a[:3].mul_(2)
    a.view(-1)[5:9].add_(1)
    return a @ y.t()


def several(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    values, at = torch.sort(x @ y)
    u, s, _ = torch.linalg.svd(values)
    return (u * s.sum()) @ x, at


def returned_twice(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    a = x @ y
    return a, a.t(), a.view(-1)[1:], (a @ y.t()).relu()


PROGRAMS = [chain, joined, written, several, returned_twice]

_kept: list[Tensor] = []
_lib = torch.library.Library("weft_code_test", "DEF")
for name, real in {
    "keeper": lambda x: _kept.append(x) or x + 1,
    "keeps_a_view": lambda x: _kept.append(x[1:]) or x + 1,
    "liar": lambda x: x.view_as(x),
}.items():
    _lib.define(f"{name}(Tensor x) -> Tensor")
    _lib.impl(name, real, "CompositeExplicitAutograd")
    torch.library.register_fake(f"weft_code_test::{name}", torch.empty_like, lib=_lib)
ops = torch.ops.weft_code_test


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    _kept.clear()
    yield
    _kept.clear()


def run(fn: Callable[..., Any], *shapes: tuple[int, int]) -> str:
    """Runs it compiled, twice; gives the code."""
    given = [torch.randn(s) for s in shapes or ((12, 18), (18, 18))]
    torch._dynamo.reset()
    compiled = torch.compile(fn, options={"post_grad_custom_post_pass": _Watched()}, dynamic=False)
    # Where CI is set, torch refuses by itself what `liar` does.
    name = "error_on_custom_op_aliasing"
    lenient = functorch_config.patch({name: False} if hasattr(functorch_config, name) else {})
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False), lenient:
        results, codes = run_and_get_code(compiled, *given)
        torch.testing.assert_close(compiled(*given), fn(*given), rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(results, fn(*given), rtol=1e-4, atol=1e-3)
    return str(codes[0])


@pytest.mark.parametrize("program", PROGRAMS)
def test_memory_is_as_planned(program: Callable[..., Any]) -> None:
    code = run(program)
    assert "weft_watch.end(" in code
    assert ("None" in re.findall(r"weft_watch.end\((\w+)\)", code)) == (program is several)


def test_a_buffer_that_a_kernel_computes_in_the_place_of_another_within_it() -> None:
    """Inductor removes the first from the kernel, and yet allocates it for the second."""
    with fake_ranks(2) as group:

        def fn(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            a = x * 2
            return c10d.wait_tensor(c10d.all_reduce(a, "sum", group)) @ y, a * 0.5

        code = run(fn)
    for old in re.findall(r"weft_watch.reused\('(\w+)'", code):
        assert f"weft_watch.made('{old}'" in code
    assert "weft_watch.reused(" in code


def test_what_is_used_again_is_watched() -> None:
    code = run(chain)
    assert code.count("# reuse") == code.count("weft_watch.reused(") > 1
    assert code.count("weft_watch.freed(") > 1


@pytest.mark.parametrize(
    ("op", "said"),
    [
        (ops.keeper, r"buf\d is used again as buf\d while something still holds it"),
        (ops.keeps_a_view, r"buf\d is used again as buf\d while something still holds it"),
        (ops.liar, r"buf\d lies in the memory of buf\d, which was not planned"),
    ],
)
def test_an_op_that_holds_what_it_should_not(op: Callable[..., Tensor], said: str) -> None:
    """Inductor computes the relu in the memory of the product, which the op has kept."""

    def fn(x: Tensor, y: Tensor) -> Tensor:
        a = x @ y
        b = op(a)
        return (a.relu() @ y.t()) + (b @ y.t())

    with pytest.raises(Exception, match="generated code's memory is not as planned: .*" + said):
        run(fn)


def test_what_is_held_after_its_end() -> None:
    def fn(x: Tensor, y: Tensor) -> Tensor:
        return ops.keeper((x @ y).sum(0, keepdim=True)) @ y[:, :5]

    with pytest.raises(Exception, match=r"bytes of buf\d are still held after its end"):
        run(fn)


def test_sizes_and_the_peak_are_compared() -> None:
    watch = CodeWatch()
    a = torch.empty(10)
    watch.made("a", a, 44)
    with pytest.raises(Exception, match="a has 40 bytes, 44 were planned; the peak was 40 bytes, 44 were"):
        watch.end(44)


@pytest.mark.parametrize("waited", [False, True])
def test_a_coalesced_call_may_hold_what_it_is_done_with(waited: bool) -> None:
    """Once one of its results was waited for, and until all were."""
    watch = CodeWatch()
    tensors = {name: torch.empty(4) for name in ("a", "b", "out_a", "out_b")}
    for name, tensor in tensors.items():
        watch.made(name, tensor, 16)
    held = [*tensors.values()]
    watch.begun(["a", "b"], ["out_a", "out_b"])
    if waited:
        watch.waited("out_a")
    again = watch.alone("a", tensors.pop("a"))
    watch.reused("a", "c", again)
    assert bool(watch.problems) is not waited
    watch.waited("out_a")
    watch.waited("out_b")
    again = watch.alone("b", tensors.pop("b"))
    watch.reused("b", "d", again)
    assert "b is used again as d while something still holds it" in watch.problems and held
