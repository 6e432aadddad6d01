"""What the benchmark takes for a right result: every honest one, and none with a wrong element."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import accuracy
import reductions

BF16 = torch.bfloat16


def ring(terms: list[Tensor]) -> Tensor:
    """Summed as a ring does: rounded at each hop."""
    total = terms[0]
    for term in terms[1:]:
        total = (total.float() + term.float()).to(total.dtype)
    return total


@pytest.mark.parametrize("parts", [1, 8])
@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_honest_matmuls(world: int, parts: int) -> None:
    """Partial products are rounded, their sums at each hop; and of each product, too, the parts that K is cut in."""
    K = 4096
    A, B = torch.randn(128, K).to(BF16), (torch.randn(K, 128) / K**0.5).to(BF16)
    ranks = list(zip(A.chunk(world, 1), B.chunk(world), strict=True))
    exact = [a.double() @ b.double() for a, b in ranks]
    terms = sum(product.abs() for product in exact)
    expected = accuracy.of_products(A.double() @ B.double(), terms, world, BF16)
    rounded = [
        sum(
            (p.float() @ q.float()).to(BF16).float()
            for p, q in zip(a.chunk(parts, 1), b.chunk(parts), strict=True)
        ).to(BF16)
        for a, b in ranks
    ]
    assert accuracy.problem([ring(rounded)], [expected], BF16) == ""


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_honest_sums_and_norms(world: int, dtype: torch.dtype) -> None:
    sources = [torch.randn(64, 4096).to(dtype) for _ in range(world)]
    total, terms = sum(x.double() for x in sources), sum(x.double().abs() for x in sources)
    reduced = ring(sources)
    sums = accuracy.of_sums(total, terms, max(1, world - 1), dtype)
    assert accuracy.problem([reduced], [sums], dtype) == ""
    given = [torch.randn(shape).to(dtype) for shape in ((64, 4096), (4096,), (4096,))]
    for operands, expect in ((given[:2], reductions.expected_norm), (given, reductions.expected_layer_norm)):
        outs = reductions.add_and_norm(reduced, *operands)
        expected = expect(total, terms, operands, world)
        assert accuracy.problem(outs, expected, dtype) == ""
        assert "tensors, must be 2" in accuracy.problem(outs[:1], expected, dtype)
        outs[1][5, 7] += 0.5
        assert accuracy.problem(outs, expected, dtype).startswith("wrong result: ")


@pytest.mark.parametrize("wrong", [0.06, float("inf"), float("nan")])
def test_one_wrong_element_of_a_matmul(wrong: float) -> None:
    """0.06 of what elements are typically: less than they lose without 64 of 12288 of their terms."""
    reference = torch.randn(2048, 2048, dtype=torch.float64).clamp_(-2, 2)
    expected = accuracy.of_products(reference, reference.abs(), 1, BF16)
    out = reference.to(BF16)
    assert accuracy.problem([out], [expected], BF16) == ""
    out[3, 4] = torch.tensor(reference[3, 4].item() + wrong).to(BF16)
    assert accuracy.problem([out], [expected], BF16).startswith("wrong result: ")


def test_two_ulps_of_one_sum() -> None:
    terms = [torch.rand(1024, 1024).to(BF16) for _ in range(2)]
    total = terms[0].double() + terms[1].double()
    expected = accuracy.of_sums(total, total, 1, BF16)
    out = ring(terms)
    assert accuracy.problem([out], [expected], BF16) == ""
    out.view(torch.int16)[100, 0] += 2
    assert f"1 of {1 << 20} elements; that at {100 << 10}" in accuracy.problem([out], [expected], BF16)


def test_a_result_of_another_size() -> None:
    expected = accuracy.of_sums(torch.ones(4, 2), torch.ones(4, 2), 1, BF16)
    assert "shape (2, 2), must be (4, 2)" in accuracy.problem([torch.ones(2, 2)], [expected], BF16)
