"""Hugging Face's mixtures under their own tensor-parallel plan: the experts' all-reduce combines their outputs, has the
norm after it, and the shared expert's is one with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import Outcome, check, outcomes, program
from test_hugging_face import WORLD, load, saved, tokens

EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
COMBINED = "2 choices of experts combined"
# Collectives, and what is said of those of the experts. GPT-OSS shards only the vocabulary.
MODELS: dict[str, tuple[dict[str, Any], int, str]] = {
    "Mixtral": ({"num_local_experts": 4}, 6, f"{COMBINED}, residual added, rms_norm"),
    "Qwen3Moe": ({"num_experts": 4, "head_dim": 8, **EXPERTS}, 6, f"{COMBINED}, residual added, rms_norm"),
    "GptOss": ({"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8}, 1, ""),
    "DeepseekV3": (
        *({**DEEPSEEK, **EXPERTS}, 5),
        f"{COMBINED}, shared expert added, 2 all-reduces as one, residual added, rms_norm",
    ),
}


def load_mixture(folder: Path, world: int) -> tuple[Any, Any]:
    model, exact = load(folder, world)
    exact.set_experts_implementation("eager")  # float64 has no grouped product
    return model, exact


def infer(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load_mixture(folder, world)
    with program(codegen) as p, torch.no_grad():
        got = p.compile(model, fullgraph=True)(input_ids=tokens(), use_cache=False).logits
        p.compare("logits", got, exact(input_ids=tokens()).logits)
        return p.outcome()


def infer_by_rows(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load_mixture(folder, world)
    ids = tokens()[:, :8]
    with program(codegen, sequence_parallel=True) as p, torch.no_grad():
        got = p.compile(model, fullgraph=True)(input_ids=ids, use_cache=False).logits
        p.compare("logits", got, exact(input_ids=ids).logits)
        return p.outcome()


def decode(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    """A prompt, then tokens one by one."""
    model, exact = load_mixture(folder, world)
    from transformers import StaticCache

    with program(codegen) as p, torch.no_grad():
        compiled, caches = (
            p.compile(model, dynamic=False),
            [StaticCache(m.config, 16) for m in (model, exact)],
        )
        for begin, end in ((0, 6), (6, 7), (7, 8)):
            ids, place = tokens()[:, begin:end], torch.arange(begin, end)
            got, want = (
                m(input_ids=ids, past_key_values=cache, position_ids=place[None], use_cache=True).logits
                for m, cache in zip((compiled, exact), caches, strict=True)
            )
            p.compare(f"logits of {begin}", got, want)
        return p.outcome()


def train(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load_mixture(folder, world)
    with program(codegen) as p:
        got, want = (
            m(input_ids=tokens(), labels=tokens(), use_cache=False).loss for m in (p.compile(model), exact)
        )
        p.compare("loss", got, want)
        got.backward()
        want.backward()
        p.compare_gradients(model, exact)
        return p.outcome()


@pytest.mark.parametrize("kind", [kind for kind in MODELS if kind != "Mixtral"])  # it infers by rows
def test_inference(tmp_path: Path, kind: str) -> None:
    more, fused, said = MODELS[kind]
    found = outcomes(infer, WORLD, saved(tmp_path, kind, **more), False)
    check(found, fused, [])
    lines = [line for line in found[0].text.splitlines() if "experts" in line and "merged with" not in line]
    into = "weft::fused_moe_combine_all_reduce_rms_norm"
    assert all(f"{into}, {said}" in line for line in lines), found[0].text
    assert bool(lines) == bool(said)


def test_inference_by_rows(tmp_path: Path) -> None:
    found = outcomes(infer_by_rows, WORLD, saved(tmp_path, "Mixtral", **MODELS["Mixtral"][0]), False)
    check(found, found[0].fused, [])
    assert "weft::fused_moe_combine_reduce_scatter, " in found[0].text, found[0].text


def test_decoding(tmp_path: Path) -> None:
    found = outcomes(decode, WORLD, saved(tmp_path, "DeepseekV3", **MODELS["DeepseekV3"][0]), False)
    check(found, found[0].fused, [])
    assert "weft::fused_moe_combine_all_reduce_rms_norm, " in found[0].text, found[0].text


@pytest.mark.parametrize("kind", ["Mixtral", "DeepseekV3"])
def test_training(tmp_path: Path, kind: str) -> None:
    found = outcomes(train, WORLD, saved(tmp_path, kind, **MODELS[kind][0]), False)
    check(found, found[0].fused, None)
    assert not found[0].left, found[0].text
    assert f"weft::fused_moe_combine_all_reduce, {COMBINED}" in found[0].text, found[0].text
