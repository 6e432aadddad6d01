"""Hugging Face's Llama, Gemma and Cohere under their own tensor-parallel plan: saved, loaded by every rank, and run."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from compiled import CODEGEN, Outcome, check, outcomes, program
from torch_versions import REDUCED_IN_FRONT_OF_SCALE

pytest.importorskip("transformers")

WORLD, LAYERS, VOCABULARY = 2, 2, 96
ENV = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}


SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def saved(path: Path, kind: str, **more: Any) -> Path:
    """Where a model of this kind is saved."""
    before = {k: os.environ.get(k) for k in ENV}
    os.environ.update(ENV)
    import transformers

    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **more})
    getattr(transformers, f"{kind}ForCausalLM")(config).save_pretrained(path)
    for k, v in before.items():
        os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp("llama"), "Llama")


def load(folder: Path, world: int) -> tuple[Any, Any]:
    """The model as the plan shards it, and the unsharded one in float64."""
    # Read when transformers is imported. The ranks stay for other tests, to which it means nothing.
    os.environ.update(ENV)
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=world)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
    return model, AutoModelForCausalLM.from_pretrained(folder).double()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(os.getppid()))


def infer(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load(folder, world)
    with program(codegen) as p, torch.no_grad():
        got = p.compile(model)(input_ids=tokens(), use_cache=False).logits
        p.compare("logits", got, exact(input_ids=tokens()).logits)
        return p.outcome()


def train(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load(folder, world)
    with program(codegen) as p:
        compiled = p.compile(model)
        # The second step accumulates the gradients of the first.
        for shift in (0, 1):
            ids = (tokens() + shift) % VOCABULARY
            got, want = (m(input_ids=ids, labels=ids, use_cache=False).loss for m in (compiled, exact))
            p.compare(f"loss {shift}", got, want)
            got.backward()
            want.backward()
        p.compare_gradients(model, exact)
        return p.outcome()


def generate(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = load(folder, world)
    options: dict[str, Any] = {
        "max_new_tokens": 4,
        "do_sample": False,
        "return_dict_in_generate": True,
        "output_logits": True,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    with program(codegen) as p, torch.no_grad():
        model.forward = p.compile(model.forward)
        got = model.generate(tokens(), cache_implementation="static", **options)
        want = exact.generate(tokens(), **options)
        for i, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
            p.compare(f"logits {i}", a, b)
        assert torch.equal(got.sequences, want.sequences)
        return p.outcome()


# Forward: what the plan's row-wise layers reduce, and the embedding, a norm after each; and the gather of the logits'
# vocabulary, alone.
NORMS = 2 * LAYERS + 1
FORWARD = NORMS + 1
# Backward: one reduction for each column-wise layer's input, the last of them the head's.
BACKWARD = 5 * LAYERS + 1


@CODEGEN
def test_training(folder: Path, codegen: bool) -> None:
    check(outcomes(train, WORLD, folder, codegen), FORWARD + BACKWARD, [])


@CODEGEN
def test_generation_with_a_static_cache(folder: Path, codegen: bool) -> None:
    # Two graphs: of the prompt, and of one token more.
    found = outcomes(generate, WORLD, folder, codegen)
    check(found, 2 * FORWARD, [])
    # The norm after it belongs to each reduction, and but for the embedding the residual.
    lines = [
        line for line in found[0].text.splitlines() if "fused into weft::fused_all_reduce_rms_norm" in line
    ]
    times = [re.search(r"\((\d+) times\)", line) for line in lines]
    assert sum(int(found[1]) if found else 1 for found in times) == 2 * NORMS, found[0].text


@CODEGEN
def test_inference_of_gemma(tmp_path: Path, codegen: bool) -> None:
    """Its norms add 1 to their weights, and the reduced embedding is scaled before the first of them, which keeps
    that apart from its all-reduce."""
    found = outcomes(infer, WORLD, saved(tmp_path, "Gemma", head_dim=8), codegen)
    check(found, FORWARD, [])
    assert "residual added, rms_norm, 1 added to the weight" in found[0].text
    apart = found[0].text.count("one_shot_all_reduce")
    assert apart == found[0].text.count("mul (mul.Tensor) stays after it") == int(REDUCED_IN_FRONT_OF_SCALE)


@CODEGEN
def test_inference_of_cohere(tmp_path: Path, codegen: bool) -> None:
    """LayerNorms, and attention and MLP side by side: two reductions a layer are one, with the norm that follows."""
    found = outcomes(infer, WORLD, saved(tmp_path, "Cohere", bos_token_id=1, eos_token_id=2), codegen)
    check(found, FORWARD, [])
    (line,) = (text for text in found[0].text.splitlines() if "self_attn.o_proj" in text)
    assert "fused_all_reduce_layer_norm, 2 all-reduces as one, residual added, layer_norm" in line
    assert line.endswith(f"({LAYERS} times)")
