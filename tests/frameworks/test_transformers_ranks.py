"""transformers with ep_implementation="weft": losses and gradients of "all_to_all", in one graph."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from opcommon import check
from ranks import run_ranks
from test_transformers_experts import ENV, VOCABULARY, loss_and_gradients, qwen3_moe

pytest.importorskip("transformers.distributed.expert_parallel")

BOUND = 2e-5
SHARED, OWN = {"tp_size": 2, "ep_size": 2}, {"tp_size": 1, "fsdp_size": 2, "ep_size": 2}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from transformers import Qwen3MoeForCausalLM

    for name, value in ENV.items():
        monkeypatch.setitem(os.environ, name, value)
    Qwen3MoeForCausalLM(qwen3_moe()).save_pretrained(tmp_path)
    return tmp_path


def placed(folder: Path, implementation: str, sizes: dict[str, int]) -> Any:
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(**sizes, ep_implementation=implementation)
    return Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=plan)


def same_gradients(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        got, want = (x.full_tensor() if hasattr(x, "full_tensor") else x for x in (found[name], wanted[name]))
        check(name, got, want.double(), BOUND)


def trains(rank: int, size: int, folder: Path, sizes: dict[str, int]) -> None:
    weft.drop_in.register_transformers_experts()
    torch.manual_seed(5 if sizes["tp_size"] > 1 else rank)  # what ranks share is one batch
    ids = torch.randint(0, VOCABULARY, (1, 9))
    theirs, model = (placed(folder, each, sizes) for each in ("all_to_all", "weft"))
    with torch.profiler.profile() as profile:
        found = loss_and_gradients(model, ids)
    assert {"weft::moe_dispatch", "weft::moe_combine"} <= {e.key for e in profile.key_averages()}
    same_gradients(found, loss_and_gradients(theirs, ids))
    with torch.no_grad():  # fewer tokens than ranks
        check("logits", model(ids[:, :1]).logits, theirs(ids[:, :1]).logits.double(), BOUND)


@pytest.mark.parametrize("sizes", [SHARED, OWN])
def test_losses_and_gradients_are_those_of_all_to_all(sizes: dict[str, int], folder: Path) -> None:
    run_ranks(trains, 2, folder, sizes, env=ENV)


def compiles(rank: int, size: int, folder: Path) -> int:
    from torch._dynamo.testing import CompileCounterWithBackend

    weft.drop_in.register_transformers_experts()
    torch.manual_seed(5)
    ids, counter = torch.randint(0, VOCABULARY, (1, 9)), CompileCounterWithBackend("inductor")
    model = placed(folder, "weft", SHARED)
    model.compile(backend=counter, fullgraph=True)
    same_gradients(
        loss_and_gradients(model, ids), loss_and_gradients(placed(folder, "all_to_all", SHARED), ids)
    )
    return counter.frame_count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_is_one_graph(folder: Path) -> None:
    assert run_ranks(compiles, 2, folder, env=ENV, timeout=500) == [1, 1]
