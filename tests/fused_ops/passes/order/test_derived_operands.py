"""What is gathered and scattered while copy engines send it is an expression of the graph, between CPU ranks."""

from __future__ import annotations

import torch
from derived import PROGRAMS, check_code, right, scaled
from memory_check.verified import verified, verified_in_part
from ranks import run_ranks
from torch import Tensor
from torch._inductor import config as inductor_config


def each(rank: int, world: int) -> dict[str, str]:
    return {fn.__name__: right(rank, fn, {}) for fn in PROGRAMS}


def test_operands_are_kept_until_they_are_waited_for() -> None:
    for codes in run_ranks(verified, 2, each):
        for code in codes.values():
            check_code(code)
            assert "weft_watch.end(" in code
        assert codes["cast"].count("'at::BFloat16*'") == 1, "one kernel writes the cast"


def conditional(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    return torch.cond(a.sum() < 1e9, scaled, lambda x, m, v, a: x + m, (x, m, v, a))


def nested(rank: int, world: int) -> list[str]:
    region = torch.compiler.nested_compile_region(scaled)

    def twice(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
        return region(region(x, m, v, a) / 32, m, v, a + 1)

    codes = [right(rank, fn, {}) for fn in (twice, conditional)]
    if hasattr(inductor_config, "custom_should_partition_ops"):
        parted = {"graph_partition": True, "custom_should_partition_ops": ["weft::all_gather_start"]}
        codes.append(right(rank, scaled, parted))
    return codes


def test_nested_graphs_and_partitions() -> None:
    for codes in run_ranks(verified_in_part, 2, nested):
        for code in codes:
            if "weft.all_gather_start" in code:
                check_code(code)
    assert "weft.all_gather_start" in codes[-1]
