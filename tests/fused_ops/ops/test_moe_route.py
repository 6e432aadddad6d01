"""moe_route against a sort by hand, on random choices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from weft.fused_ops import moe_route

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(1))]


def by_hand(ids: Tensor, first: int, count: int) -> tuple[list[int], list[int], list[list[int]]]:
    rows: list[int] = []
    offs, slots = [], [[-1] * ids.shape[1] for _ in range(ids.shape[0])]
    for expert in range(first, first + count):
        for token, chosen in enumerate(ids.tolist()):
            for choice, each in enumerate(chosen):
                if each == expert:
                    slots[token][choice] = len(rows)
                    rows.append(token)
        offs.append(len(rows))
    return rows + [0] * (ids.numel() - len(rows)), offs, slots


def drawn(tokens: int, k: int, experts: int, kind: str) -> Tensor:
    if kind == "one":
        return torch.full((tokens, k), int(torch.randint(experts, ())))
    if kind == "sentinels":  # also ids that are far outside
        outside = torch.tensor([-1, experts, -(2**31), 2**31 - 1])[torch.randint(4, (tokens, k))]
        return torch.where(torch.rand(tokens, k) < 0.4, outside, torch.randint(experts, (tokens, k)))
    if kind == "empty":  # every other expert
        return torch.randint((experts + 1) // 2, (tokens, k)) * 2
    return (
        torch.rand(tokens, experts).argsort(1)[:, :k] if k <= experts else torch.randint(experts, (tokens, k))
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["distinct", "one", "sentinels", "empty"])
@pytest.mark.parametrize(
    ("tokens", "k", "experts"),
    [(1, 1, 1), (7, 2, 8), (33, 8, 128), (257, 8, 37), (64, 1, 300), (0, 2, 4), (3, 0, 4)],
)
def test_like_a_sort_by_hand(tokens: int, k: int, experts: int, kind: str, device: str) -> None:
    ids = drawn(tokens, k, experts, kind)
    first = int(torch.randint(experts, ()))
    for of_rank in ((0, experts), (first, experts - first), (first, 1)):
        for dtype in (torch.int32, torch.int64):
            given = ids.to(device, dtype)
            got = moe_route(given, experts, first_expert=of_rank[0], num_local_experts=of_rank[1])
            assert all(x.dtype == torch.int32 and x.device == given.device for x in got)
            assert tuple(x.tolist() for x in got) == by_hand(ids, *of_rank)


@pytest.mark.parametrize("device", DEVICES)
def test_many_choices(device: str) -> None:
    """More than the warps of the kernel take at once."""
    tokens, k, experts = 20011, 8, 256
    ids = torch.randint(-20, experts + 20, (tokens, k))
    rows, offs, slots = (
        x.cpu() for x in moe_route(ids.to(device), experts, first_expert=64, num_local_experts=128)
    )
    here = (ids >= 64) & (ids < 192)
    assert offs[-1] == here.sum() and offs.diff(prepend=offs.new_zeros(1)).tolist() == [
        int((ids == e).sum()) for e in range(64, 192)
    ]
    assert ((slots >= 0) == here).all()
    token = torch.arange(tokens)[:, None].expand(tokens, k)[here]
    assert (rows[slots[here].long()] == token).all() and (rows[offs[-1] :] == 0).all()
    # Of one expert the choices keep their order: sorted by where they lie, they are sorted by expert and then by place.
    keys = ids[here] * tokens * k + torch.arange(tokens * k).view(tokens, k)[here]
    assert (keys[slots[here].argsort()].diff() > 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_strides(device: str) -> None:
    ids = torch.randint(9, (12, 10), device=device)
    got = moe_route(ids[::2, 1::3], 9)
    assert tuple(x.tolist() for x in got) == by_hand(ids[::2, 1::3].cpu(), 0, 9)


@pytest.mark.parametrize("device", DEVICES)
def test_under_torch_compile(device: str) -> None:
    def route(scores: Tensor) -> tuple[Tensor, ...]:
        return moe_route(scores.topk(3, dim=1)[1], 8, first_expert=2, num_local_experts=4)

    scores = torch.randn(19, 8, device=device)
    for got, want in zip(torch.compile(route, fullgraph=True)(scores), route(scores), strict=True):
        assert torch.equal(got, want)


def test_opcheck() -> None:
    ids = torch.randint(8, (5, 2))
    torch.library.opcheck(torch.ops.weft.moe_route, (ids, 8, 2, 4))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "floats": ({"topk_ids": torch.zeros(2, 2)}, "topk_ids: is torch.float32, must be int32 or int64"),
    "a list": ({"topk_ids": [[1]]}, "topk_ids: is of type list, must be a tensor"),
    "one dimension": ({"topk_ids": torch.zeros(2).long()}, "topk_ids: has 1 dimensions, must have 2"),
    "no experts": ({"num_experts": 0}, "num_experts: is 0, must be at least 1"),
    "a number": ({"num_experts": 1.0}, "num_experts: is of type float, must be an integer"),
    "first": ({"first_expert": 8}, "first_expert: is 8, must be from 0 to 7"),
    "too many": ({"first_expert": 6, "num_local_experts": 3}, "num_local_experts: is 3, must be from 1 to 2"),
    "none": ({"num_local_experts": 0}, "num_local_experts: is 0, must be from 1 to 8"),
    "beyond the kernel": ({"num_experts": 5000}, "num_local_experts: is 5000, must be from 1 to 2048"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    wrong, message = REFUSED[name]
    given: dict[str, Any] = {"topk_ids": torch.zeros(2, 2).long(), "num_experts": 8, **wrong}
    for device in ("cpu", "meta"):
        ids = given["topk_ids"]
        moved = ids.to(device) if isinstance(ids, Tensor) else ids
        with pytest.raises((ValueError, TypeError)) as raised:
            moe_route(moved, **{k: v for k, v in given.items() if k != "topk_ids"})
        assert str(raised.value).startswith(message)
