"""Compiled graphs make the calls of the program, each once and in its order, whatever work is between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from programs import Calls, Program, compiled, drawn, with_work, written
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor import config_comms
from weft.fused_ops.library.communicating import why_unordered

SHAPES = ((4, 16), (16, 16))
MANY = pytest.param(range(2, 40), marks=[pytest.mark.slow, pytest.mark.timeout(1800)], id="more")


@pytest.fixture(autouse=True)
def group(two: str) -> Iterator[str]:
    """The other rank never does anything: nothing is run."""
    yield two
    torch._dynamo.reset()


def check(program: Program, grad: bool, **named: object) -> None:
    wanted = written(program, SHAPES, grad)
    forward, backward = compiled(program, SHAPES, grad, **named)
    assert forward + backward == wanted


@pytest.mark.parametrize("seeds", [pytest.param(range(2), id="some"), MANY])
def test_calls_are_those_of_the_program(group: str, seeds: range) -> None:
    """In inference and in training."""
    for seed in seeds:
        check(with_work(drawn(seed, group), seed), seed % 2 == 1)


@pytest.mark.parametrize("seeds", [pytest.param(range(1), id="some"), MANY])
def test_what_a_checkpoint_computes_again(group: str, seeds: range) -> None:
    """As gradients need it, not as in eager mode all of it at once: but on every rank the same."""
    for seed in seeds:
        program = drawn(seed, group, checkpoints=True)
        wanted = written(program, SHAPES, True)
        forward, backward = compiled(with_work(program, seed), SHAPES, True)
        assert (forward, backward) == compiled(with_work(program, seed + 1), SHAPES, True)
        assert forward == wanted[: len(forward)]
        assert not Counter(forward + backward) - Counter(wanted)


def test_every_op_is_kept_where_its_result_is_unused(group: str) -> None:
    from programs import OPS

    steps = [(op, 0, 2 * i + 4, False) for i, op in enumerate(OPS)]
    check(Program(group, [*steps, ("one_shot_all_reduce", 0, 40, True)]), False)


def test_equal_calls_are_not_merged(group: str) -> None:
    def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        ops = torch.ops.weft
        a = ops.one_shot_all_reduce(x, "sum", group) + ops.one_shot_all_reduce(x, "sum", group).sin()
        _, (b, c) = ops.fused_all_gather_matmul(x, [w, w], 0, group)
        _, (d, e) = ops.fused_all_gather_matmul(x, [w, w], 0, group)
        return a * 2, b * c + d.sin() * e

    forward, backward = compiled(fn, SHAPES, True)
    assert forward + backward == written(fn, SHAPES, True)
    assert len(forward) == 4


def test_equal_calls_in_place_are_not_merged(group: str) -> None:
    """Of copies, which are merged: so what is written to is one tensor."""

    def fn(x: Tensor, w: Tensor) -> Tensor:
        y = x @ w
        a, b = y.detach().clone(), y.detach().clone()
        for each in (a, b):
            torch.ops.weft.one_shot_all_reduce_(each, "sum", group)
        return y * a.sin() + y * b

    forward, backward = compiled(fn, SHAPES, False)
    assert forward + backward == written(fn, SHAPES, False)
    assert len(forward) == 2


def test_sizes_that_are_not_known(group: str) -> None:
    program = with_work(drawn(1, group), 1)
    wanted = [name for name, _ in written(program, SHAPES, True)]
    forward, backward = compiled(program, SHAPES, True, dynamic=True)
    assert [name for name, _ in forward + backward] == wanted


PASSES = ("sink_waits", "raise_comms", "reorder_compute_for_overlap")
UNSAFE = {
    "sink_waits_iterative": "sink_waits_iterative_unsafe_collectives_reorder",
    "reorder_communication_preserving_peak_memory": "reorder_iterative_unsafe_collectives_reorder",
}


@pytest.mark.parametrize("passes", [PASSES, tuple(UNSAFE)], ids=["greedy", "iterative"])
def test_overlapping_keeps_the_order(group: str, passes: tuple[str, ...]) -> None:
    """The iterative passes as far as they may not change it."""
    with (
        inductor_config.patch(
            reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=[*passes]
        ),
        config_comms.patch(dict.fromkeys(UNSAFE.values(), False)),
    ):
        check(with_work(drawn(5, group), 5), False)


def refused(group: str) -> str:
    with pytest.raises(Exception, match="with which ranks may communicate in different orders") as error:
        compiled(drawn(1, group), SHAPES, False)
    return str(error.value)


@pytest.mark.parametrize("name", list(UNSAFE))
def test_passes_that_may_change_it_are_refused_by_name(group: str, name: str) -> None:
    from torch._inductor import comms

    for each in (name, getattr(comms, name)):
        with inductor_config.patch(
            reorder_for_compute_comm_overlap=True, reorder_for_compute_comm_overlap_passes=[each]
        ):
            assert f"its passes have '{name}', and torch._inductor.config_comms.{UNSAFE[name]} is True" in (
                refused(group)
            )


def test_scheduling_by_estimates_is_refused_by_name() -> None:
    setting = "aten_distributed_optimizations.enable_overlap_scheduling"
    with inductor_config.patch({setting: True}):
        assert why_unordered() == f"torch._inductor.config.{setting} is True"
    assert why_unordered() is None


def test_lite_mode_keeps_the_order_or_is_refused_by_name(group: str) -> None:
    """There Inductor calls the ops as they are. It would order them by the memory that they need."""
    with inductor_config.patch(fallback_by_default=True):
        setting = "fallback_by_default and reorder_for_peak_memory are True"
        assert f"weft: torch._inductor.config.{setting}" in refused(group)
        with inductor_config.patch(reorder_for_peak_memory=False):
            check(with_work(drawn(4, group), 4), False)


def test_orders_of_ranks_that_work_otherwise(group: str) -> None:
    program = drawn(2, group)
    orders: list[tuple[Calls, Calls]] = [
        compiled(with_work(program, seed), SHAPES, True) for seed in (11, 12)
    ]
    assert orders[0] == orders[1]
