"""Programs of other libraries for bench/suites/frameworks.py, unchanged: a step of each, for each contender."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import weft
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from weft.fused_ops import FusionPass

#: By option of ``FusionPass``; "plain" is torch.compile without it.
COMPILED: dict[str, dict[str, Any] | None] = {"plain": None, "weft": {}, "agree=False": {"agree": False}}
#: In eager mode: the group's backend. "plain alone" is timed before there is a group of weft's in the process.
GROUPS = ("plain alone", "plain", "process group")
KINDS = {
    "prefill": tuple(COMPILED),
    "train": tuple(COMPILED),
    "generate": tuple(COMPILED),
    "eager": GROUPS,
    "ddp": GROUPS,
    "fsdp2": GROUPS,
    "experts": ("plain", "weft"),
}
NEW_TOKENS = 48
_HEADS: dict[str, Any] = {"num_attention_heads": 32, "num_key_value_heads": 8}
_8B: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, **_HEADS}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": _8B,
    "Qwen3": {**_8B, "intermediate_size": 12288, "vocab_size": 151936, "head_dim": 128},
    "Mixtral": {**_8B, "hidden_size": 1024, "intermediate_size": 3584, "vocab_size": 32000},
    # As Qwen3-30B's, but for the vocabulary.
    "Qwen3Moe": {
        "hidden_size": 2048,
        "vocab_size": 1024,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
}
#: What DDP and FSDP2 train, each rank all of it: 1.2 billion parameters.
WHOLE: dict[str, Any] = {**_8B, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "vocab_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SMALL_HEADS: dict[str, Any] = {"head_dim": 8}
SMALL_OF: dict[str, dict[str, Any]] = {
    "Qwen3": _SMALL_HEADS,
    "Qwen3Moe": {**_SMALL_HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
}


@dataclass(frozen=True)
class FrameworkCase:
    """What is measured: ``FrameworkCase("Qwen3", "train", 1024)``."""

    model: str
    kind: str
    tokens: int

    @classmethod
    def of(cls, text: str) -> FrameworkCase:
        """
        Raises:
            ValueError: it is not "MODEL KIND TOKENS".
        """
        match text.split():
            case [model, kind, tokens] if model in SIZES and kind in KINDS and tokens.isdecimal():
                return cls(model, kind, int(tokens))
        raise ValueError(
            f"--cases: has {text!r}, must have MODEL KIND TOKENS: one of {', '.join(SIZES)}, one of "
            f"{', '.join(KINDS)}, and a number"
        )

    def __str__(self) -> str:
        return f"{self.model} {self.kind} {self.tokens}"


@dataclass(frozen=True)
class FrameworkProgram:
    """A step, what it gives (to be compared with plain's), and (fused, left) by now."""

    step: Callable[[], object]
    results: Callable[[], list[Tensor]]
    counts: Callable[[], tuple[int, int]]


def make_programs(
    case: FrameworkCase, names: Sequence[str], layers: int, device: torch.device
) -> dict[str, Callable[[], FrameworkProgram]]:
    """What makes the program of each contender. Compiled ones share a model, but for ``generate``, with which a model
    keeps one compiled form."""
    ids = torch.randint(96, (1 if device.type == "cuda" else 2, case.tokens), device=device)
    dist.broadcast(ids, 0)
    if case.kind in ("ddp", "fsdp2", "eager"):
        return {name: partial(_in_eager_mode, case, name, layers, ids) for name in names}
    if case.kind == "experts":
        return {name: partial(_of_experts, case, name, layers, ids) for name in names}
    mesh = DeviceMesh(device.type, list(range(dist.get_world_size())), mesh_dim_names=("tp",))
    make_model = partial(model_of, case.model, layers, device, mesh)
    if case.kind == "generate":
        return {name: partial(_generating, make_model, COMPILED[name], ids) for name in names}
    model = make_model()
    return {name: partial(_compiled, case.kind, model, COMPILED[name], ids) for name in names}


def model_of(
    kind: str, layers: int, device: torch.device, mesh: DeviceMesh | None, experts: str | None = None
) -> Any:
    """transformers' model of random weights: under ``tp_plan="auto"`` of the mesh, without one that of WHOLE.

    ``experts``: they are placed by rank, and so does their ``ep_implementation`` exchange tokens.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    import transformers
    from transformers.distributed import DistributedConfig

    small = device.type == "cpu"
    whole = mesh is None and experts is None
    sizes = WHOLE if whole else {**SIZES[kind], "num_hidden_layers": layers}
    if small:
        sizes = SMALL | SMALL_OF.get(kind, {})
    config = getattr(transformers, f"{kind}Config")(**sizes, max_position_embeddings=8192)
    sharded: dict[str, Any] = {}
    if mesh is not None:
        plan = DistributedConfig(tp_plan="auto", tp_size=mesh.size())
        sharded = {"distributed_config": plan, "device_mesh": mesh}
    if experts is not None:
        size = dist.get_world_size()
        sharded["distributed_config"] = DistributedConfig(
            tp_size=size, ep_size=size, ep_implementation=experts
        )
    torch.manual_seed(17)
    with device:
        return getattr(transformers, f"{kind}ForCausalLM").from_pretrained(
            None,
            config=config,
            state_dict={},  # all weights are missing, so all are drawn
            dtype=torch.float32 if small else torch.bfloat16,
            **sharded,
        )


def _compiled(kind: str, model: Any, settings: dict[str, Any] | None, ids: Tensor) -> FrameworkProgram:
    fusion = None if settings is None else FusionPass(**settings)
    run = torch.compile(model, dynamic=False, options=fusion.options if fusion else None)
    if kind == "train":
        return _training(model, run, ids, lambda: _fused(fusion))
    return _prefill(run, ids, lambda: _fused(fusion))


def _of_experts(case: FrameworkCase, name: str, layers: int, ids: Tensor) -> FrameworkProgram:
    weft.drop_in.register_transformers_experts()
    in_one_graph = name == "weft"
    model = model_of(case.model, layers, ids.device, None, "weft" if in_one_graph else "all_to_all")
    return _prefill(torch.compile(model, dynamic=False, fullgraph=in_one_graph), ids, lambda: (0, 0))


def _prefill(run: Callable[..., Any], ids: Tensor, counts: Callable[[], tuple[int, int]]) -> FrameworkProgram:
    def step() -> Tensor:
        with torch.no_grad():
            return run(input_ids=ids, use_cache=False).logits  # type: ignore[no-any-return]

    return FrameworkProgram(step, lambda: [step()], counts)


def _training(
    model: nn.Module, run: Callable[..., Any], ids: Tensor, counts: Callable[[], tuple[int, int]]
) -> FrameworkProgram:
    def step() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss: Tensor = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss

    def results() -> list[Tensor]:
        loss = step().detach()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        return [loss, *(getattr(grad, "_local_tensor", grad) for grad in grads)]

    return FrameworkProgram(step, results, counts)


def _generating(
    make_model: Callable[[], Any], settings: dict[str, Any] | None, ids: Tensor
) -> FrameworkProgram:
    from transformers.generation import CompileConfig

    model = make_model()
    fusion = None if settings is None else FusionPass(**settings)
    options = {"triton.cudagraphs": ids.is_cuda, **(fusion.options if fusion else {})}
    how: dict[str, Any] = {"dynamic": False, "mode": None, "options": options}
    config: Any = CompileConfig(**how)
    config._compile_all_devices = True
    given: dict[str, Any] = {"max_new_tokens": NEW_TOKENS if ids.is_cuda else 4, "do_sample": False}

    def step() -> Tensor:
        return model.generate(  # type: ignore[no-any-return]
            ids,
            cache_implementation="static",
            compile_config=config,
            pad_token_id=0,
            eos_token_id=None,
            **given,
        )

    # Tokens of equal probability on GPUs, where sums are rounded in another order, need not be chosen alike.
    return FrameworkProgram(step, lambda: [] if ids.is_cuda else [step().double()], lambda: _fused(fusion))


def _in_eager_mode(case: FrameworkCase, name: str, layers: int, ids: Tensor) -> FrameworkProgram:
    group = dist.new_group(backend="weft") if name == "process group" else dist.group.WORLD
    assert group is not None
    mesh = DeviceMesh.from_group(group, ids.device.type, mesh_dim_names=("tp",))
    run = model = model_of(case.model, layers, ids.device, mesh if case.kind == "eager" else None)
    if case.kind == "eager" and model._device_mesh.get_group() is not group:
        raise ValueError(
            "--cases: has an eager one, must have none with a transformers that makes its own mesh"
        )
    if case.kind == "ddp":
        run = DistributedDataParallel(model, process_group=group)
    if case.kind == "fsdp2":
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    def counts() -> tuple[int, int]:
        if name != "process group":
            return 0, 0
        calls = weft.process_group(group).calls()
        taken = sum(each.count for each in calls if each.by == "weft")
        return taken, sum(each.count for each in calls) - taken

    return _training(model, run, ids, counts)


def _fused(fusion: FusionPass | None) -> tuple[int, int]:
    if fusion is None:
        return 0, 0
    report = fusion.report()
    return report.fused, report.left
