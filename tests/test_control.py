"""The question that a wrong result asks: it finds what is wrong, and nothing where nothing is."""

from __future__ import annotations

from unittest import mock

import torch
from control import own_products


def test_right_matmuls_are_right() -> None:
    assert (
        own_products(torch.device("cpu"), 2, rows=128)
        == "of 2 products of torch's own on the CPU 0 are wrong"
    )


def test_one_wrong_element_is_seen() -> None:
    right = torch.mm

    def wrong(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        c = right(a, b)
        c[7, 11] += 0.5
        return c

    with mock.patch.object(torch, "mm", wrong):
        assert own_products(torch.device("cpu"), 2, rows=128).endswith(" 2 are wrong")
    with mock.patch.object(torch, "mm", side_effect=[torch.zeros(2, 2), torch.ones(2, 2)]):
        assert own_products(torch.device("cpu"), 1).endswith(" 1 are wrong")
