"""LayerNorms after an all-reduce, as real models spell them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graphs import Seen, applied, captured, check_same, traced
from spelled import reduced as ar
from torch import Tensor

NORM = "weft::fused_all_reduce_layer_norm"
aten = torch.ops.aten
Fn = Callable[..., Any]
HIDDEN = 5
EPS = 1e-5
pytestmark = pytest.mark.usefixtures("two")


def torch_norm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return F.layer_norm(x, (HIDDEN,), weight, bias, EPS)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Hugging Face's CohereLayerNorm, which has no bias."""
    wide = x.to(torch.float32)
    mean = wide.mean(-1, keepdim=True)
    variance = (wide - mean).pow(2).mean(-1, keepdim=True)
    wide = (wide - mean) * torch.rsqrt(variance + EPS)
    wide = weight.to(torch.float32) * wide
    return (wide if bias is None else wide + bias).to(x.dtype)


def usual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As in GPT-2, OPT and Falcon: the sum is the next residual."""
    y = residual + x
    return torch_norm(y, weight, bias), y


def no_residual(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The reduced tensor is used, too."""
    return torch_norm(x, weight, bias), x.sin() + residual


def no_bias(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """As in MPT."""
    return torch_norm(residual + x, weight)


def only_a_bias(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch_norm(residual + x, None, bias)


def neither(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """As in OLMo."""
    y = residual + x
    return torch_norm(y), y


def in_float32(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    return torch_norm(y.float(), weight.float(), bias.float()).to(x.dtype), y


def cohere(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    y = residual + x
    return by_hand(y, weight), y


def with_a_bias(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return by_hand(residual + x, weight, bias)


def rounded_before(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch_norm(residual + x) * weight + bias


def then_gated(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """What is multiplied by more than a row is no part of it."""
    return torch_norm(residual + x) * residual


def nemotron(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """NemotronLayerNorm1P; the 1 is added after the sum."""
    y = residual + x
    return torch_norm(y, weight + 1, bias), y


# The function of the reduced tensor, and which of residual, weight and bias the op gets.
FORMS: dict[Fn, str] = {
    usual: "rwb",
    no_residual: "wb",
    no_bias: "rw",
    only_a_bias: "rb",
    neither: "r",
    in_float32: "rwb",
    cohere: "rw",
    with_a_bias: "rwb",
    rounded_before: "rwb",
    then_gated: "r",
    nemotron: "rwb",
}


def inputs(dtype: torch.dtype, wide: bool = False, grad: bool = False) -> list[Tensor]:
    x, w, residual = (torch.randn(s).to(dtype) for s in ((2, 6, 8), (8, HIDDEN), (2, 6, HIDDEN)))
    columns = [torch.randn(HIDDEN).to(torch.float32 if wide else dtype) for _ in range(2)]
    return [t.requires_grad_(grad) for t in (x, w, residual, *columns)]


def of_product(norm: Fn) -> Fn:
    return lambda x, w, residual, weight, bias: norm(ar(x @ w), residual, weight, bias)


def given(seen: Seen) -> str:
    """Which operands the op has."""
    (op,) = seen.after.find_nodes(
        op="call_function", target=torch.ops.weft.fused_all_reduce_layer_norm.default
    )
    assert op.args[4] == EPS
    assert op.kwargs.get("weight_offset", 0.0) in (0.0, 1.0)
    return "".join(letter for letter, node in zip("rwb", op.args[1:4], strict=True) if node is not None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("norm", FORMS, ids=lambda f: f.__name__)
def test_fused(norm: Fn, dtype: torch.dtype) -> None:
    (seen,) = captured(of_product(norm), *inputs(dtype))
    assert seen.fused == [NORM], seen.entries
    added = "r" in FORMS[norm]
    one = ", 1 added to the weight" if norm is nemotron else ""
    assert seen.entries[0].detail == ("residual added, " if added else "") + "layer_norm" + one
    assert seen.entries[0].form == f"product → all_reduce{' → add' if added else ''} → layer_norm"
    assert given(seen) == FORMS[norm]
    assert not seen.after.find_nodes(op="call_function", target=aten.rsqrt.default)
    check_same(seen, 2)


def only(fn: Fn, *given: Tensor) -> Seen:
    """The graph as it is written."""
    seen = applied(traced(fn, *(given or inputs(torch.bfloat16))))
    check_same(seen, 2)
    return seen


@pytest.mark.parametrize("norm", [usual, neither, in_float32, then_gated], ids=lambda f: f.__name__)
def test_what_is_not_decomposed(norm: Fn) -> None:
    seen = only(of_product(norm))
    assert (seen.fused, given(seen)) == ([NORM], FORMS[norm]), seen.entries


def test_weight_and_bias_may_be_float32() -> None:
    def wide(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch_norm((residual + x).float(), weight, bias).to(x.dtype)

    (seen,) = captured(of_product(wide), *inputs(torch.bfloat16, wide=True))
    assert (seen.fused, given(seen)) == ([NORM], "rwb"), seen.entries
    check_same(seen, 2)


def test_sizes_may_be_symbolic() -> None:
    operands = inputs(torch.bfloat16)
    for t in (operands[0], operands[2]):
        torch._dynamo.mark_dynamic(t, 1)
    (seen,) = captured(of_product(usual), *operands, dynamic=True)
    assert seen.fused == [NORM], seen.entries
    check_same(seen, 2)


def test_what_is_added_before_the_weight_stays_after() -> None:
    def fn(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return (torch_norm(residual + x) + bias) * weight

    (seen,) = captured(of_product(fn), *inputs(torch.bfloat16))
    assert (seen.fused, given(seen)) == ([NORM], "rb"), seen.entries
    assert seen.after.find_nodes(op="call_function", target=aten.mul.Tensor)
    check_same(seen, 2)


def test_in_training_it_is_fused_where_the_backward_norms_again() -> None:
    """From the sum, which is kept anyway."""
    forward, backward = captured(of_product(usual), *inputs(torch.bfloat16, grad=True))
    assert forward.fused == [NORM], forward.entries
    check_same(forward, 2)
    check_same(backward, 2)
