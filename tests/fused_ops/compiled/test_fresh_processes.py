"""Inductor takes the ops for collectives from the first graph on, whatever was imported first, whoever calls them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


#: The first case of a process compiles its first graphs; the others are spared the imports.
CASES = {"weft first": ("op:swaps", "pass:swaps"), "Inductor first": ("op:greedy",)}


@functools.cache
def run(first: str) -> dict[str, Any]:
    """What a process makes of each of its cases."""
    paths = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_VEC_ISA_OK": "1"}
    command = [sys.executable, str(HERE / "fresh.py"), first, *CASES[first]]
    done = subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("first", "setting"), [("weft first", "swaps"), ("Inductor first", "greedy")])
def test_calls_of_the_program_keep_their_order(first: str, setting: str) -> None:
    orders = run(first)[f"op:{setting}"]
    assert len(orders) == 4, orders
    assert orders[0] == orders[1]
    assert orders[2] == orders[3]
    assert all(len(order) >= 6 for order in orders)


def test_what_the_pass_puts_in_keeps_its_order() -> None:
    orders = run("weft first")["pass:swaps"]
    names = ["weft::fused_all_gather_matmul", "weft::fused_matmul_reduce_scatter"]
    shapes = [[[rows, 16], [2 * rows, 16]] for rows in (2, 4, 6, 8)]
    assert orders == [[[name, s] for both in shapes for name, s in zip(names, both, strict=True)]] * 2
