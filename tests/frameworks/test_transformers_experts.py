"""transformers' mixtures with experts_implementation="weft": losses and gradients of "grouped_mm"."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from opcommon import check
from ranks import run_ranks

pytest.importorskip("transformers.integrations.moe")

VOCABULARY, EXPERTS = 64, 6
ENV = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
}


def mixtral() -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(**SIZES, intermediate_size=48, num_local_experts=EXPERTS)


def qwen3_moe() -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **SIZES, intermediate_size=48, moe_intermediate_size=24, num_experts=EXPERTS, head_dim=8
    )


def gpt_oss() -> Any:
    from transformers import GptOssConfig

    return GptOssConfig(**SIZES, intermediate_size=40, num_local_experts=EXPERTS, head_dim=8)


def deepseek_v3() -> Any:
    from transformers import DeepseekV3Config

    own = {
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 8,
        "v_head_dim": 8,
    }
    groups = {"n_routed_experts": EXPERTS, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
    sizes = {**SIZES, "num_key_value_heads": 4}
    return DeepseekV3Config(**sizes, **own, **groups, intermediate_size=48, moe_intermediate_size=24)


CONFIGS: list[Callable[[], Any]] = [mixtral, qwen3_moe, gpt_oss, deepseek_v3]


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9))


def loss_and_gradients(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.parametrize("config_of", CONFIGS)
def test_losses_and_gradients_are_those_of_grouped_mm(config_of: Callable[[], Any]) -> None:
    from transformers import AutoModelForCausalLM

    weft.drop_in.register_transformers_experts()
    model = AutoModelForCausalLM.from_config(config_of()).train()
    with torch.no_grad():
        for name, p in model.named_parameters():  # biases of experts are zero at first
            if "experts" in name:
                p.normal_(std=0.2)
    ids, found = tokens(), {}
    for implementation in ("grouped_mm", "weft"):
        model.set_experts_implementation(implementation)
        with torch.profiler.profile() as profile:
            found[implementation] = loss_and_gradients(model, ids)
        products = any(e.key == "weft::grouped_matmul" for e in profile.key_averages())
        assert products == (implementation == "weft")
    assert found["weft"].keys() == found["grouped_mm"].keys()
    for name, want in found["grouped_mm"].items():
        check(name, found["weft"][name], want.double(), 2e-5)


def sliced(rank: int, size: int, folder: Path) -> None:
    """As its plan slices the experts, and as it places them by rank."""
    from transformers import MixtralForCausalLM
    from transformers.distributed import DistributedConfig

    weft.drop_in.register_transformers_experts()
    torch.manual_seed(3)
    ids = tokens()
    whole = loss_and_gradients(MixtralForCausalLM.from_pretrained(folder), ids)
    for experts in ({}, {"ep_size": size}):
        plan = DistributedConfig(tp_plan="auto", tp_size=size, **experts)
        named = {"distributed_config": plan, "experts_implementation": "weft"}
        model = MixtralForCausalLM.from_pretrained(folder, **named)
        assert model.config._experts_implementation == "weft"
        found = loss_and_gradients(model, ids)
        for name, want in whole.items():
            got = found[name]
            got = got.full_tensor() if hasattr(got, "full_tensor") else got
            check(f"{name} {experts}", got, want.double(), 1e-4)


def test_sliced_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import MixtralForCausalLM

    for name, value in ENV.items():
        monkeypatch.setitem(os.environ, name, value)
    MixtralForCausalLM(mixtral()).save_pretrained(tmp_path)
    run_ranks(sliced, 2, tmp_path, env=ENV)
