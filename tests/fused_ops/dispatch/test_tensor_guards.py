"""What says that tensors are like those of a call before: only of such, and in the same state of the thread."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_launch_cache_of_matmuls import OTHERS
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx
from weft.fused_ops.dispatch import tensor_guards
from weft.symm_mem.backends import cuda_state

KIND = "a kind"


@dataclass(eq=False)
class Found:
    alike: tensor_guards.TensorGuard
    device: int = 0
    stream: int = 7


@pytest.fixture(autouse=True)
def stream(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    current = [7]
    cuda = SimpleNamespace(
        current_device=lambda: 0, is_capturing=lambda: False, current_stream=lambda device: current[device]
    )
    monkeypatch.setattr(cuda_state, "state", cuda)
    return current


def test_tensors_elsewhere_are_alike() -> None:
    x, y = torch.randn(3, 4, 8), torch.randn(8, 16).t()
    same = tensor_guards.guards_of([x, y])
    assert same(x, y) and same(x.clone(), torch.randn(8, 16).t())
    with torch.no_grad():
        assert same(x, y)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("other", [*OTHERS, "list"])
@pytest.mark.parametrize("position", [0, 1])
def test_others_are_not_likely(other: str, position: int) -> None:
    given: list[Any] = [torch.randn(3, 4, 8), torch.randn(3, 4, 8)]
    kept: dict[Hashable, Any] = {}
    tensor_guards.note_likely(kept, KIND, Found(tensor_guards.guards_of(given)))
    assert tensor_guards.likely_call(kept, KIND, given) is not None
    given[position] = given[position].tolist() if other == "list" else OTHERS[other](given[position])
    # Addresses are not compared.
    assert (tensor_guards.likely_call(kept, KIND, given) is None) == (other != "misaligned")


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "dual level": forward_ad.dual_level,
    "fake mode": FakeTensorMode,
    "below autograd": torch._C._AutoDispatchBelowAutograd,
    "autocast": lambda: torch.autocast("cpu"),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_nothing_is_likely_in_another_state(context: str) -> None:
    x = torch.randn(3, 4)
    kept: dict[Hashable, Any] = {}
    tensor_guards.note_likely(kept, KIND, Found(tensor_guards.guards_of([x])))
    with CONTEXTS[context]():
        assert tensor_guards.likely_call(kept, KIND, [x]) is None
    assert tensor_guards.likely_call(kept, KIND, [x]) is not None


@pytest.mark.parametrize("pre_dispatch", [False, True])
def test_nothing_is_likely_in_traces_and_transforms(pre_dispatch: bool) -> None:
    x, answers = torch.randn(3, 4), []
    kept: dict[Hashable, Any] = {}
    tensor_guards.note_likely(kept, KIND, Found(tensor_guards.guards_of([x])))

    def asks(y: Tensor) -> Tensor:
        answers.extend(tensor_guards.likely_call(kept, KIND, [z]) for z in (x, y))
        return y.sum()

    make_fx(asks, pre_dispatch=pre_dispatch)(x)
    torch.func.vmap(asks)(torch.randn(2, 3, 4))
    torch.func.grad(asks)(x)
    torch.func.functionalize(asks)(x)
    assert answers == [None] * 8


@pytest.mark.parametrize("mode", [nullcontext, torch.inference_mode])
def test_in_inference_mode_its_own_cached_calls_are(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    kept: dict[Hashable, Any] = {}
    with mode():
        x = torch.randn(3, 4)
        tensor_guards.note_likely(kept, KIND, Found(tensor_guards.guards_of([x])))
        assert tensor_guards.likely_call(kept, KIND, [torch.randn(3, 4)]) is not None
    with torch.inference_mode(mode is nullcontext):
        assert tensor_guards.likely_call(kept, KIND, [torch.randn(3, 4)]) is None


def test_what_requires_a_gradient_is_alike_while_none_is_wanted() -> None:
    x, weight = torch.randn(3, 4), torch.nn.Parameter(torch.randn(4))
    with torch.no_grad():
        same = tensor_guards.guards_of([x, weight])
        assert same(x, weight) and same(x, torch.nn.Parameter(torch.randn(4)))
        assert not same(x, torch.randn(4)) and not same(x, torch.nn.Parameter(torch.randn(3)))
    assert not same(x, weight), "its gradient is wanted here"
    with torch.no_grad():
        assert same(x, weight)


def test_what_may_want_a_gradient_or_is_found_in_a_rare_state_is_never_tried() -> None:
    assert tensor_guards.guards_of([torch.randn(3, requires_grad=True)]) is tensor_guards.matches_none
    with torch.autocast("cpu"):
        assert tensor_guards.guards_of([torch.randn(3)]) is tensor_guards.matches_none


def test_another_stream_has_cached_calls_of_its_own(stream: list[int]) -> None:
    x = torch.randn(3, 4)
    kept: dict[Hashable, Any] = {}
    found = {number: Found(tensor_guards.guards_of([x]), stream=number) for number in (7, 8)}
    for one in found.values():
        tensor_guards.note_likely(kept, KIND, one)
    for number in (7, 8, 7, 9):
        stream[0] = number
        assert tensor_guards.likely_call(kept, KIND, [x]) is found.get(number)


def test_the_last_few_cached_calls_are_tried() -> None:
    kept: dict[Hashable, Any] = {}
    sizes = range(1, 7)
    for size in [*sizes, 3]:
        tensor_guards.note_likely(kept, KIND, Found(tensor_guards.guards_of([torch.empty(size)])))
    assert [tensor_guards.likely_call(kept, KIND, [torch.empty(size)]) is not None for size in sizes] == [
        False
    ] * 2 + [True] * 4
    assert tensor_guards.likely_call(kept, "another kind", [torch.empty(3)]) is None


def test_no_tensor_is_kept() -> None:
    x = torch.randn(3)
    gone, same = weakref.ref(x), tensor_guards.guards_of([x])
    del x
    gc.collect()
    assert gone() is None and same(torch.randn(3))
