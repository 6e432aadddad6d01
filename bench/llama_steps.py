"""The steps that the suite llama times: a sharded Llama in training, prefill or decoding, compiled for a contender."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as torch_symm
from llama_by_hand import shard_by_hand
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from weft.fused_ops import FusionPass
from weft.fused_ops.passes.records.report import VoteCounts
from without_communication import WithoutCommunication

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from llama_model import SMALL, Attention, Llama, Sizes, rotary_tables, rotate, shard

#: 8 of the 32 layers of Llama-3 8B, and its whole vocabulary.
GPU_SIZES = Sizes(
    layers=8,
    vocabulary=128256,
    dim=4096,
    heads=32,
    kv_heads=8,
    hidden=14336,
    seq=8192,
    batch=1,
    dtype="bfloat16",
)
CPU_SIZES = replace(SMALL, batch=1)
SEED = 17
#: No contender to win against: a step takes as long if all communication is hidden.
BOUND = "plain without communication"


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        mode: "train", "prefill" or "decode".
        compile: "whole", or "blocks" by themselves.
        seq: tokens of a sequence; of the context while decoding.
        graphs: Inductor's CUDA graphs.
        weights: "dtensor", or of decoding "local": sharded by hand, which costs the host less.
    """

    mode: str
    compile: str
    seq: int
    batch: int
    graphs: bool = False
    weights: str = "dtensor"

    @property
    def tokens(self) -> int:
        """Of a step, on all ranks together."""
        return self.batch * (1 if self.mode == "decode" else self.seq)

    def __str__(self) -> str:
        size = f"batch {self.batch}" if self.mode == "decode" else f"seq {self.seq}"
        how = f"{' graphs' if self.graphs else ''}{' local' if self.weights == 'local' else ''}"
        return f"{self.mode} {self.compile} {size}{how}"


@dataclass
class Marks:
    """When a step began, its forward ended, its backward ended, and it ended."""

    points: list[Any]
    result: Tensor

    def milliseconds(self) -> list[float]:
        """[whole, forward, backward]."""
        begin, forward, backward, end = self.points
        if isinstance(begin, float):
            return [(end - begin) * 1e3, (forward - begin) * 1e3, (backward - forward) * 1e3]
        return [begin.elapsed_time(end), begin.elapsed_time(forward), forward.elapsed_time(backward)]

    def loss(self) -> float:
        return self.result.full_tensor().item() if isinstance(self.result, DTensor) else self.result.item()


@dataclass
class Step:
    """A step, which is run again and again."""

    run: Callable[[], Marks]
    device: torch.device
    fusion: FusionPass | None  # weft's

    def voted(self) -> VoteCounts:
        """Of all graphs of this process since the pass was made; none without it."""
        return self.fusion.report().questions if self.fusion is not None else VoteCounts()

    def peak_bytes(self) -> int | None:
        """Of one step, of torch's allocator, on this rank."""
        if self.device.type != "cuda":
            return None
        torch.cuda.reset_peak_memory_stats()
        self.run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()


class CachedAttention(Attention):
    """One token of each sequence, over a static cache of keys and values; ``at`` is its place."""

    keys: Tensor
    values: Tensor
    at: Tensor
    seen: Tensor

    def allocate(self, batch: int, context: int, kv_heads: int, at: Tensor) -> None:
        shape = (batch, kv_heads, context, self.head_dim)
        where = self.wq.weight
        for name in ("keys", "values"):
            cache = torch.randn(shape, device=where.device, dtype=where.dtype)
            self.register_buffer(name, cache, persistent=False)
        self.register_buffer("at", at, persistent=False)
        self.register_buffer(
            "seen", (torch.arange(context, device=where.device) <= at)[None], persistent=False
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, seq, _ = x.shape
        heads = (batch, seq, -1, self.head_dim)
        q, k, v = (w(x).view(heads).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        self.keys.index_copy_(2, self.at, k)
        self.values.index_copy_(2, self.at, v)
        y = F.scaled_dot_product_attention(q, self.keys, self.values, attn_mask=self.seen, enable_gqa=True)
        return self.wo(y.transpose(1, 2).reshape(batch, seq, -1))


def options_of(contender: str, graphs: bool) -> dict[str, Any]:
    """torch.compile's options of a contender, but for the pass."""
    options: dict[str, Any] = {"triton.cudagraphs": True} if graphs else {}
    if contender == "torch":
        options["_micro_pipeline_tp"] = True
    if contender == BOUND:
        options["post_grad_custom_pre_pass"] = WithoutCommunication()
    return options


def make_step(case: Case, contender: str, device: torch.device) -> Step:
    """A step of a case, compiled for a contender."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    if contender == "torch":
        torch_symm.enable_symm_mem_for_group(mesh.get_group().group_name)
    sizes = GPU_SIZES if device.type == "cuda" else CPU_SIZES
    sizes = replace(sizes, batch=case.batch, seq=min(case.seq, sizes.seq))
    settings: dict[str, Any] = {
        "agree": "agree=False" not in contender,
        "regather": "regather=True" in contender,
    }
    fusion = FusionPass(**settings) if contender.startswith("weft") else None
    options = options_of(contender, case.graphs) | ({} if fusion is None else fusion.options)
    torch.manual_seed(SEED)
    with device:
        model = Llama(sizes).to(getattr(torch, sizes.dtype))
        tables = [t.float() for t in rotary_tables(sizes, device)]
    if case.weights == "local":
        shard_by_hand(model, mesh.get_group())
    else:
        inference = case.mode == "decode"
        shard(model, mesh, sequence=not inference, loss=not inference)
    make = _decoding if case.mode == "decode" else _training if case.mode == "train" else _prefill
    return Step(make(model, sizes, tables, case.compile, options), device, fusion)


def _mark(device: torch.device) -> Any:
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class _Arrived(torch.autograd.Function):
    """Waits for a result of DTensor's: with one that is on its way torch 2.13 gives a compiled block no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.trigger_wait() if isinstance(x, AsyncCollectiveTensor) else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad


def _compiled_blocks(model: Llama, options: dict[str, Any]) -> None:
    model.embedding.register_forward_hook(lambda module, given, x: _Arrived.apply(x))
    for layer in model.layers:
        layer.compile(dynamic=False, options=options)


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def _loss_of(model: nn.Module, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _cross_entropy(model(tokens, cos, sin), labels)


def _training(
    model: Llama, sizes: Sizes, tables: list[Tensor], how: str, options: dict[str, Any]
) -> Callable[[], Marks]:
    device = tables[0].device
    drawn = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seq + 1), device=device)
    dist.broadcast(drawn, 0)
    tokens, labels = drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()
    forward: Callable[..., Tensor]
    if how == "whole":
        forward = torch.compile(_loss_of, dynamic=False, options=options)
    else:
        _compiled_blocks(model, options)
        # By itself, too, as torchtitan does; torch 2.13 cannot differentiate loss_parallel() in eager mode.
        loss_of = torch.compile(_cross_entropy, dynamic=False, options=options)

        def forward(model: nn.Module, tokens: Tensor, labels: Tensor, *tables: Tensor) -> Tensor:
            return loss_of(model(tokens, *tables), labels)

    # The optimizer works on what lies here, as every weight's update is local.
    weights = list(model.parameters())
    local = [nn.Parameter(_local(w.detach())) for w in weights]
    optimizer = torch.optim.AdamW(local, lr=2e-4, fused=True)

    def run() -> Marks:
        points = [_mark(device)]
        with loss_parallel():
            loss = forward(model, tokens, labels, *tables)
            points.append(_mark(device))
            loss.backward()
        points.append(_mark(device))
        take_gradients(local, weights)
        optimizer.step()
        return Marks([*points, _mark(device)], loss.detach())

    return run


def _prefill(
    model: Llama, sizes: Sizes, tables: list[Tensor], how: str, options: dict[str, Any]
) -> Callable[[], Marks]:
    device = tables[0].device
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seq), device=device)
    dist.broadcast(tokens, 0)
    return _inference(model, tokens, tables, how, options, device)


def _decoding(
    model: Llama, sizes: Sizes, tables: list[Tensor], how: str, options: dict[str, Any]
) -> Callable[[], Marks]:
    device, place = tables[0].device, sizes.seq - 2
    at = torch.tensor([place], device=device)
    for module in [m for m in model.modules() if isinstance(m, Attention)]:
        module.__class__ = CachedAttention
        assert isinstance(module, CachedAttention)
        module.allocate(sizes.batch, sizes.seq, sizes.kv_heads // dist.get_world_size(), at)
    tokens = torch.randint(sizes.vocabulary, (sizes.batch, 1), device=device)
    dist.broadcast(tokens, 0)
    return _inference(model, tokens, [t[place : place + 1] for t in tables], how, options, device)


def _inference(
    model: Llama,
    tokens: Tensor,
    tables: list[Tensor],
    how: str,
    options: dict[str, Any],
    device: torch.device,
) -> Callable[[], Marks]:
    compiled: Any = model
    if how == "whole":
        compiled = torch.compile(model, dynamic=False, options=options)
    else:
        _compiled_blocks(model, options)

    def run() -> Marks:
        with torch.no_grad():
            begin = _mark(device)
            logits = compiled(tokens, *tables)
            end = _mark(device)
        return Marks([begin, end, end, end], _local(logits).flatten()[0].float())

    return run


def take_gradients(local: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
    """Gives what lies here of each weight its gradient. What ranks have yet to sum goes through one all-reduce."""
    partial: list[Tensor] = []
    for here, weight in zip(local, weights, strict=True):
        grad: Any = weight.grad
        weight.grad = None
        if isinstance(grad, DTensor) and grad.placements != weight.placements:  # type: ignore[attr-defined]
            if grad.placements == (Partial(),) and weight.placements == (Replicate(),):  # type: ignore[attr-defined]
                partial.append(_local(grad))
            else:  # that of an eager embedding
                grad = grad.redistribute(placements=weight.placements)  # type: ignore[attr-defined]
        here.grad = _local(grad)
    if partial:
        together = torch.cat([grad.flatten() for grad in partial])
        dist.all_reduce(together)
        for grad, summed in zip(partial, together.split([g.numel() for g in partial]), strict=True):
            grad.copy_(summed.view_as(grad))


def _local(t: Any) -> Any:
    return t.to_local() if isinstance(t, DTensor) else t
