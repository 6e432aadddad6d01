"""What a graph computes part by part, to need the memory of one part, is not computed all at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from graphs import AG, AR, RS, captured, check_same, gather, scatter
from torch import Tensor
from torch.distributed._functional_collectives import all_reduce
from torch.nn import functional as F
from weft.fused_ops.passes import FusionPass

pytestmark = pytest.mark.usefixtures("two")
PARTS = 8


def products(found: object) -> list[int]:
    """How many products each op that gathers computes."""
    nodes = found.after.nodes  # type: ignore[attr-defined]
    return [len(n.args[1]) for n in nodes if getattr(n.target, "__name__", "") == f"{AG[6:]}.default"]


def parts_of_a_vocabulary(x: Tensor, head: Tensor) -> Tensor:
    gathered, total = gather(x), torch.zeros(())
    for part in head.split(16, 1):
        total = total + (gathered @ part).exp().sum(-1)
    return total


def layers_that_look_at_one_tensor(x: Tensor, keys: Tensor) -> Tensor:
    gathered, y = gather(x), x
    for key in keys.unbind():
        k = gathered @ key
        y = y + torch.softmax(y @ k.t(), -1) @ k
    return y


def experts(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    total = torch.zeros(())
    for a, b in zip(w1.unbind(), w2.unbind(), strict=True):
        total = total + F.silu(x @ a) @ b
    return total


@pytest.mark.parametrize(
    ("fn", "shapes"),
    [
        (parts_of_a_vocabulary, [(32, 8), (8, 16 * PARTS)]),
        (layers_that_look_at_one_tensor, [(32, 8), (PARTS, 8, 8)]),
    ],
)
def test_products_that_come_later_do_not_join(
    fn: Callable[..., Tensor], shapes: list[tuple[int, ...]]
) -> None:
    (found,) = captured(fn, *map(torch.randn, shapes))
    assert found.fused == [AG]
    (together,) = products(found)
    assert 1 < together <= PARTS / 2
    check_same(found, 2)


def test_products_whose_results_are_kept_are_computed_together() -> None:
    """As for the backward pass."""
    forward, _ = captured(
        lambda x, head: parts_of_a_vocabulary(x, head).log(),
        *(torch.randn(s, requires_grad=True) for s in ((32, 8), (8, 16 * PARTS))),
    )
    assert products(forward) == [PARTS]


def test_queries_keys_and_values_stay_together() -> None:
    def fn(x: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor) -> Tensor:
        gathered = gather(x)
        a, b, c = (torch.sin(gathered @ w) for w in (q, k, v))
        return scatter(torch.softmax(a @ b.t(), -1) @ c @ o)

    matrices = [torch.randn(8, 8, requires_grad=True) for _ in range(4)]
    (found,) = captured(fn, torch.randn(32, 8), *(m.detach() for m in matrices))
    assert found.fused == [AG, RS]
    assert products(found) == [3]
    _, backward = captured(fn, torch.randn(32, 8, requires_grad=True), *matrices)
    assert backward.fused == [AG, RS]
    assert "3 products, summed as one" in str(backward.entries)


def test_a_sum_of_what_is_computed_part_by_part_is_left() -> None:
    shapes = (32, 8), (PARTS, 8, 16), (PARTS, 16, 8)
    (found,) = captured(lambda *t: scatter(experts(*t)), *map(torch.randn, shapes))
    assert found.fused == [None]
    assert f"the {PARTS} products that it sums are computed one after the other" in found.reasons
    assert str(found.after) == str(found.before)
    (found,) = captured(
        lambda *t: scatter(experts(*t)),
        *map(torch.randn, shapes),
        fusion=FusionPass(agree=False, fuse="always"),
    )
    assert found.fused == [RS]
    check_same(found, 2)


def test_such_a_sum_is_only_reduced() -> None:
    def fn(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
        return all_reduce(experts(x, w1, w2), "sum", dist.distributed_c10d._get_default_group())

    shapes = (512, 16), (PARTS, 16, 64), (PARTS, 64, 512)
    (found,) = captured(fn, *map(torch.randn, shapes))
    assert found.fused == [AR]
    check_same(found, 2)
    (found,) = captured(fn, *map(torch.randn, shapes), fusion=FusionPass(agree=False, fuse="always"))
    assert found.fused == ["weft::fused_matmul_all_reduce"]


def test_a_sum_of_what_is_there_anyway_is_one() -> None:
    def fn(x: Tensor, w: Tensor) -> Tensor:
        total = torch.zeros(())
        for a, b in zip(x.unbind(), w.unbind(), strict=True):
            total = total + a.sin() @ b
        return scatter(total)

    (found,) = captured(fn, torch.randn(PARTS, 32, 16), torch.randn(PARTS, 16, 8))
    assert found.fused == [RS]
    check_same(found, 2)
