"""The measured table of costs: alike on all ranks, kept on disk, and what the order is estimated by."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from graphs import fake_ranks
from orders import c10d, graph_of, name
from ranks import run_ranks
from torch import Tensor
from weft import symm_mem
from weft.fused_ops import FusionPass, measure_costs
from weft.fused_ops.passes.order import costs, measured
from weft.fused_ops.passes.order.costs import TABLES, CostTable, table_of, tables_key, use_table


def measuring(rank: int, world: int, folder: str) -> tuple[str, int, str]:
    """The table; how often this rank has measured; and that the pass's key has it."""
    calls: list[Any] = []
    os.environ["WEFT_CACHE_DIR"] = folder
    as_always = measured._times

    def times(*args: Any) -> dict[str, float]:
        calls.append(args)
        found = as_always(*args)
        return found | {"small": 100.0 * (rank + 1), "contention": 1.5 if rank == 1 else 0.5}

    assert FusionPass(reorder=True).uuid().count("measured=True") == 0
    with patch.object(measured, "_times", times):
        table = measure_costs()
        again = measure_costs(dist.group.WORLD)
    assert table == again == table_of("cpu")
    assert FusionPass(reorder=True).uuid().count("measured=True") == 1
    use_table("cpu", None)
    del os.environ["WEFT_CACHE_DIR"]
    return table.key(), len(calls), json.dumps({"latency": table.latency, "contention": table.contention})


def test_all_ranks_have_the_slowest_ones_table(tmp_path: Path) -> None:
    ranks = run_ranks(measuring, 2, str(tmp_path))
    assert ranks[0] == ranks[1]
    assert ranks[0][1] == 1  # the second time it was there
    assert json.loads(ranks[0][2]) == {"latency": 200.0, "contention": 1.5}
    assert "measured=True" in ranks[0][0]
    (file,) = tmp_path.glob("times-cpu-x2-*.json")
    ((kind, kept),) = json.loads(file.read_text())["kinds"].items()
    assert kind.startswith("costs of NVLink: ")
    # Another run of the program measures nothing.
    later = run_ranks(measuring, 2, str(tmp_path))
    assert [r[1] for r in later] == [0, 0]
    assert [r[0] for r in later] == [r[0] for r in ranks]
    assert json.loads(file.read_text())["kinds"] == {kind: kept}


def failing(rank: int, world: int, folder: str) -> str:
    os.environ["WEFT_CACHE_DIR"] = folder

    def times(*args: Any) -> dict[str, float]:
        if rank == 1:
            raise RuntimeError("no memory to measure in")
        return {"product": 1.0}

    with patch.object(measured, "_times", times), pytest.raises(Exception, match="rank 1") as error:
        measure_costs()
    del os.environ["WEFT_CACHE_DIR"]
    symm_mem.reset()
    return str(error.value)


def test_a_rank_that_cannot_measure_is_named_on_all(tmp_path: Path) -> None:
    for said in run_ranks(failing, 2, str(tmp_path)):
        assert "no memory to measure in" in said
    assert not list(tmp_path.glob("tuned-cpu*"))


def beside(x: Tensor, w: Tensor) -> Tensor:
    y = x @ w
    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(x, 2, name()))
    return gathered.sum() + y.sum()


def test_the_order_is_estimated_by_it() -> None:
    slow = CostTable(1e3, 1e3, (("weft", 1.0), ("NVLink", 1.0), ("network", 1.0)), 7.0, 2.0, 1.0, True)
    reports = []
    with fake_ranks(2):
        try:
            for table in (None, slow):
                use_table("cpu", table)
                fusion = FusionPass([], reorder=1.0, agree=False)
                fusion(graph_of(beside))
                reports.append(fusion.report())
        finally:
            use_table("cpu", None)
        with pytest.raises(ValueError, match="group: has one rank"):
            measure_costs(dist.new_group([0]))
    assert [o.measured for r in reports for o in r.orders] == [False, True]
    assert reports[1].orders[0].before > 30_000 > reports[0].orders[0].before
    assert "(predicted by measured costs;" in reports[1].details()
    assert tables_key() == "" and table_of("cpu") is TABLES["cpu"]


@pytest.mark.parametrize("times", [{"product": 2.0, "launch": 3.0}, {"product": 2e4, "launch": 1.0}])
def test_rates_are_positive_whatever_was_measured(times: dict[str, float]) -> None:
    given = {"copy": 1.0, "small": 5.0, "large": 4.0, "contention": 9.0, **times}
    table = measured._table_from(given, "cpu", "NVLink", 2)
    assert table.multiply_adds > 0 and table.memory > 0 and dict(table.links)["NVLink"] > 0
    assert table.contention == 4.0
    assert dict(table.links)["network"] == dict(costs.TABLES["cpu"].links)["network"]
    assert torch.tensor(table.launch) > 0
