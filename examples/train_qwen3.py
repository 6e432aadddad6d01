"""transformers' Qwen3 or its mixture, trained with tensor parallelism with and without weft; it survives dead ranks.

    export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1     # or ranks that are started again find the store of those that died
    torchrun --standalone --nproc-per-node 2 --max-restarts 3 examples/train_qwen3.py /tmp/qwen3

Where a rank dies, torchrun starts all of them again, and they go on from the newest checkpoint in the folder. So does a
later run, between as many ranks as it has. Each rank adds a line of JSON for each step to its file in the folder. There
is one rank a GPU; where there are fewer GPUs, CPU ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import transformers
import weft
from torch import Tensor
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_map
from transformers.distributed import DistributedConfig
from weft import symm_mem
from weft.fused_ops import FusionPass

_TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 128,
}
_HEADS = {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
_EXPERTS = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
SIZES: dict[str, dict[str, int]] = {
    "tiny": _TINY,
    "0.6B": {**_HEADS, "intermediate_size": 3072, "num_hidden_layers": 28, "vocab_size": 151936},
    "tiny mixture": {**_TINY, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "1B mixture": {**_HEADS, **_EXPERTS, "num_hidden_layers": 16, "vocab_size": 151936},
}
#: A sentence has a word of each: "the old ship follows a river. "
GRAMMAR = (
    ("the", "a", "every"),
    ("old", "red", "small", "quiet"),
    ("ship", "bird", "clerk", "engine"),
    ("follows", "sees", "paints"),
    ("the", "no", "its"),
    ("river", "road", "house", "cloud"),
)


def batch(step: int, rows: int, tokens: int, device: torch.device) -> Tensor:
    """Bytes of text, [rows, tokens]: those of a step are the same in every run."""
    draw, text = random.Random(step), ""
    while len(text) < rows * tokens:
        text += " ".join(draw.choice(words) for words in GRAMMAR) + ". "
    return torch.tensor(list(text.encode()[: rows * tokens]), device=device).view(rows, tokens)


def load_model(folder: Path, size: str, contender: str, device: torch.device) -> Any:
    """As ``tp_plan="auto"`` shards it. The weights of the first run are drawn by rank 0."""
    kind = "Qwen3Moe" if "num_experts" in SIZES[size] else "Qwen3"
    model_class = getattr(transformers, f"{kind}ForCausalLM")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if dist.get_rank() == 0 and not (folder / "config.json").exists():
        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**SIZES[size], tie_word_embeddings=True)
        with device:
            model_class(config).to(dtype).save_pretrained(folder)
    dist.barrier()
    given: dict[str, Any] = {}
    if kind == "Qwen3Moe" and contender == "weft":
        weft.drop_in.register_transformers_experts()
        given["experts_implementation"] = "weft"
    if dist.get_world_size() > 1:
        given["distributed_config"] = DistributedConfig(tp_plan="auto", tp_size=dist.get_world_size())
        given["device_mesh"] = DeviceMesh(
            device.type, list(range(dist.get_world_size())), mesh_dim_names=("tp",)
        )
    return model_class.from_pretrained(folder, dtype=dtype, **given).to(device).train()


def make_optimizer(model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
    """A fused update takes no DTensors together with other tensors."""
    parameters = list(model.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) is sharded] for sharded in (True, False)]
    return torch.optim.AdamW([{"params": kind} for kind in kinds if kind], lr=rate, fused=True)


class Checkpoints:
    """Of a model and its optimizer, by torch.distributed.checkpoint: for any number of ranks."""

    def __init__(self, folder: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.folder, self.model, self.optimizer = folder, model, optimizer
        self.options = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)

    def state(self) -> dict[str, Any]:
        model, optimizer = dcp_state.get_state_dict(self.model, self.optimizer, options=self.options)
        return {"model": model, "optimizer": optimizer}

    def save(self, step: int) -> None:
        dcp.save(tree_map(_contiguous, self.state()), checkpoint_id=self.folder / str(step))

    def load_newest(self) -> int:
        """The steps that were made before it; 0 where there is none."""
        # torch writes .metadata last: a checkpoint without it is not whole.
        step = max((int(file.parent.name) for file in self.folder.glob("*/.metadata")), default=0)
        if step:
            mine = self.state()
            found = tree_map(_contiguous, mine)
            dcp.load(found, checkpoint_id=self.folder / str(step))
            found = tree_map(_placed_as, found, mine)
            dcp_state.set_state_dict(
                self.model,
                self.optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
                options=self.options,
            )
        return step


def _contiguous(x: Any) -> Any:
    """Experts' gate and up are one parameter, of which each rank has two pieces: checkpoints know only one piece."""
    if not isinstance(x, DTensor):
        return x
    kinds = [p if p.is_replicate() else Shard(p.dim) for p in x.placements]  # type: ignore[attr-defined]
    return x.redistribute(placements=kinds)


def _placed_as(x: Any, like: Any) -> Any:
    return x.redistribute(placements=like.placements) if isinstance(x, DTensor) else x


def bytes_in_use(device: torch.device) -> dict[str, int]:
    """Bytes: of the process, of weft's heap, and of torch on the GPU."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    found = {"rss": pages * resource.getpagesize(), "heap": symm_mem.stats(device=device).mapped}
    if device.type == "cuda":
        found["allocated"] = torch.cuda.memory_allocated()
        found["reserved"] = torch.cuda.memory_reserved()
    return found


def train(given: argparse.Namespace, device: torch.device) -> None:
    model = load_model(given.folder, given.size, given.contender, device)
    options = FusionPass().options if given.contender == "weft" else None
    run = torch.compile(model, dynamic=False, options=options)
    optimizer = make_optimizer(model, given.rate)
    checkpoints = Checkpoints(given.folder, model, optimizer)
    # The first forward adds hooks to parameters: compiled, it would be compiled again for the second step.
    model(input_ids=batch(0, given.rows, given.tokens, device), use_cache=False)
    about = {"pid": os.getpid(), "world": dist.get_world_size()}
    about["restarts"] = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    with (given.folder / f"rank{dist.get_rank()}.jsonl").open("a", buffering=1) as log:
        for step in range(checkpoints.load_newest(), given.steps):
            begin = time.perf_counter()
            ids = batch(step, given.rows, given.tokens, device)
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            done = {"step": step, "loss": loss.item(), "seconds": time.perf_counter() - begin}
            log.write(json.dumps(done | about | bytes_in_use(device)) + "\n")
            if (step + 1) % given.save_every == 0:
                checkpoints.save(step + 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="of the weights, the checkpoints and what was logged")
    parser.add_argument("--contender", choices=("plain", "weft"), default="weft")
    parser.add_argument("--size", choices=SIZES, default="tiny")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--backend", help="default: nccl, between CPU ranks gloo")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    backend = given.backend or ("nccl" if on_gpus else "gloo")
    dist.init_process_group(backend, device_id=device if backend == "nccl" else None)
    train(given, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
