"""transformers under tp_plan="auto": generation by a CompileConfig that names weft, and its Trainer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from metadata import use_metadata, write_metadata
from opcommon import check
from ranks import run_ranks
from torch._inductor import config as inductor_config
from weft.fused_ops import FusionPass

pytest.importorskip("transformers")

VOCABULARY = 96
ENV = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
# Of one layer: what the row-wise layers reduce, the embedding's, and the gather of the logits; in the backward, each
# column-wise layer's input and the head's.
FORWARD, BACKWARD = 4, 6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a model of random weights is saved, and the metadata of an installed weft."""
    from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
    }
    path = tmp_path_factory.mktemp("llama")
    AutoModelForCausalLM.from_config(LlamaConfig(**sizes)).save_pretrained(path)
    AutoModelForCausalLM.from_config(Qwen3Config(**sizes, head_dim=8)).save_pretrained(path / "qwen3")
    write_metadata(path)
    return path


def loaded(folder: Path, size: int) -> tuple[Any, Any]:
    """(the model as its plan shards it, the whole one)."""
    os.environ.update(ENV)
    os.chdir(folder)
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    plan = DistributedConfig(tp_plan="auto", tp_size=size)
    model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=plan)
    return model, AutoModelForCausalLM.from_pretrained(folder)


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(os.getppid()))


def generates(rank: int, size: int, folder: Path) -> int:
    model, whole = loaded(folder, size)
    use_metadata(folder)
    from transformers.generation import CompileConfig

    options: dict[str, Any] = {
        "max_new_tokens": 3,
        "do_sample": False,
        "pad_token_id": 0,
        "eos_token_id": None,
    }
    options |= {"return_dict_in_generate": True, "output_logits": True}
    config = CompileConfig(backend="weft", fullgraph=False, dynamic=False, mode=None)
    config._compile_all_devices = True  # transformers compiles on GPUs alone by itself
    with torch.no_grad(), inductor_config.patch(force_disable_caches=True):
        got = model.generate(tokens(), cache_implementation="static", compile_config=config, **options)
        want = whole.double().generate(tokens(), **options)
    for i, (a, b) in enumerate(zip(got.logits, want.logits, strict=True)):
        check(f"logits {i}", a, b, 1e-5)
    assert torch.equal(got.sequences, want.sequences)
    return weft.passes.fusion_report().fused


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_generation_by_a_compile_config(folder: Path) -> None:
    """The prompt runs in eager mode, each token after it in the compiled graph."""
    assert run_ranks(generates, 2, folder, fresh=True, timeout=800) == [FORWARD, FORWARD]


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": tokens()[i % 2], "labels": tokens()[i % 2]}


def losses(model: Any, **arguments: Any) -> list[float]:
    from transformers import Trainer, TrainingArguments

    given = {"max_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1, "learning_rate": 0.01}
    given |= {
        "use_cpu": True,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "output_dir": "out",
    }
    trainer = Trainer(model=model, args=TrainingArguments(**given, **arguments), train_dataset=Rows())
    trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trainer_trains(rank: int, size: int, folder: Path, by_config: bool) -> int:
    model, whole = loaded(folder, size)
    use_metadata(folder)
    # accelerate, which the Trainer asks, refuses tensor parallelism between CPU ranks: it is not told of it.
    model._tp_size = None
    fusion = FusionPass()
    with inductor_config.patch(force_disable_caches=True):
        if by_config:
            with inductor_config.patch(post_grad_custom_post_pass=fusion):
                got = losses(model, torch_compile=True)
        else:
            model.compile(backend="weft")
            got = losses(model)
    want = losses(whole)
    assert want[0] > want[1]
    assert got == pytest.approx(want, rel=1e-4)  # two updates in float32
    return (fusion.report() if by_config else weft.passes.fusion_report()).fused


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("by_config", [False, True], ids=["model.compile", "Inductor's configuration"])
def test_the_trainer(folder: Path, by_config: bool) -> None:
    fused = FORWARD + BACKWARD
    assert run_ranks(trainer_trains, 2, folder, by_config, fresh=True, timeout=800) == [fused, fused]


def trains_by_columns(rank: int, size: int, folder: Path, returns_logits: bool) -> Any:
    model, whole = loaded(folder, size)
    fusion = FusionPass(loss_parallel=1, strict=True)

    def step(ids: torch.Tensor) -> Any:
        out = model(input_ids=ids, labels=ids)
        return (out.loss, out.logits) if returns_logits else (out.loss,)

    ids = tokens()
    with inductor_config.patch(force_disable_caches=True):
        got = torch.compile(step, options=fusion.options)(ids)
        got[0].backward()
    out = whole.double()(input_ids=ids, labels=ids)
    out.loss.backward()
    for name, a, b in zip(("loss", "logits"), got, (out.loss, out.logits), strict=False):
        check(name, a.detach(), b.detach(), 1e-5)
    for (name, p), q in zip(model.named_parameters(), whole.parameters(), strict=True):
        grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        check(name, grad, q.grad, 1e-5)
    gathers = [e for e in fusion.report().entries if e.collective == "all_gather_into_tensor"]
    return [e.fused_into for e in gathers], fusion.report().left, gathers[0].detail


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("model", "returns_logits"), [(".", False), ("qwen3", True)])
def test_losses_of_each_ranks_columns(folder: Path, model: str, returns_logits: bool) -> None:
    """Every collective is fused; logits that are returned are gathered after the loss."""
    into = ["weft::fused_linear_cross_entropy"]
    more = "by chunks of rows"
    if returns_logits:
        into = ["weft::cross_entropy_of_sharded_logits", "weft::one_shot_all_gather"]
        more = "its logits are whole: they are needed for more than the loss"
    for found in run_ranks(trains_by_columns, 2, folder / model, returns_logits, fresh=True, timeout=800):
        assert found[:2] == (into, 0) and found[2].endswith(more), found
