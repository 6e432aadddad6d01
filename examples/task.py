"""What the demo runs with and without weft's pass: steps of one sharded Llama, its errors, its times, its training."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from llama_model import Llama, Sizes, rotary_tables, shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

HEAD_START = (
    10_000_000  # cycles that a GPU waits before a timed step, so that the whole step is queued by then
)
# Of a model of dim 1. Adam's first updates move each weight by the rate: the more a sum has, the further it goes.
LEARNING_RATE = 0.016


@dataclass
class TrainStep:
    """A forward and a backward pass of the sharded model, and when each began and ended."""

    logits: Tensor
    loss: Tensor
    model: Llama
    marks: list[Any]

    def milliseconds(self) -> list[float]:
        """Of the forward pass, of the backward pass, and of both."""
        a, b, c = self.marks
        if isinstance(a, float):
            return [(b - a) * 1e3, (c - b) * 1e3, (c - a) * 1e3]
        c.synchronize()
        return [a.elapsed_time(b), b.elapsed_time(c), a.elapsed_time(c)]


class Task:
    """One model and one batch of tokens, the same on every rank."""

    def __init__(self, sizes: Sizes, seed: int, mesh: DeviceMesh, device: torch.device) -> None:
        self.sizes, self.mesh, self.device = sizes, mesh, device
        self.dtype: torch.dtype = getattr(torch, sizes.dtype)
        torch.manual_seed(seed)
        with device:
            model = Llama(sizes).to(self.dtype)
            for module in model.modules():
                if isinstance(module, nn.RMSNorm):
                    nn.init.uniform_(module.weight, 0.5, 1.5)
            tokens = torch.randint(sizes.vocabulary, (sizes.batch, sizes.seq + 1))
        self.tokens, self.labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        self.weights = model.state_dict()
        self.tables = rotary_tables(sizes, device)

    def model(self, dtype: torch.dtype) -> Llama:
        with self.device:
            model = Llama(self.sizes).to(dtype)
        model.load_state_dict(self.weights)
        return model

    def reference(self) -> dict[str, Tensor]:
        """Logits, loss and gradients of the unsharded model in float64."""
        model = self.model(torch.float64)
        for layer in model.layers:
            # In float64 the attention of several blocks at once is more than a GPU holds.
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        logits, loss = logits_and_loss(model, self.tokens, self.labels, *self.tables)
        loss.backward()
        return {"logits": logits.detach(), "loss": loss.detach(), **gradients(model)}

    def stepper(self, **options: Any) -> Callable[[], TrainStep]:
        """What makes one step of the sharded model, compiled with ``options``."""
        model = self.model(self.dtype)
        shard(model, self.mesh)
        forward = torch.compile(logits_and_loss, dynamic=False, **options)
        tables = [t.float() for t in self.tables]

        def step() -> TrainStep:
            model.zero_grad(set_to_none=True)
            marks = [mark(self.device)]
            # The logits stay cut along the vocabulary.
            with loss_parallel():
                logits, loss = forward(model, self.tokens, self.labels, *tables)
                marks.append(mark(self.device))
                loss.backward()
            return TrainStep(logits.detach(), loss.detach(), model, [*marks, mark(self.device)])

        return step

    def train(self, steps: list[Callable[[], TrainStep]], count: int) -> Iterator[list[float]]:
        """Trains the model of each of ``steps`` on the one batch: each one's loss before so many updates by AdamW."""
        optimizers: list[torch.optim.Optimizer | None] = [None] * len(steps)
        for _ in range(count):
            losses = []
            for i, step in enumerate(steps):
                done = step()
                losses.append(full_tensor(done.loss).item())
                rate = LEARNING_RATE / self.sizes.dim**0.5
                optimizer = optimizers[i] or torch.optim.AdamW(done.model.parameters(), lr=rate)
                optimizer.step()
                optimizers[i] = optimizer
            yield losses

    def errors(self, step: TrainStep, reference: dict[str, Tensor]) -> dict[str, float]:
        """How far logits, loss and each gradient are from the reference: the largest of all ranks."""
        found = {"logits": step.logits, "loss": step.loss, **gradients(step.model)}
        errors = [
            (full_tensor(found[name]).double() - wanted).norm() / wanted.norm()
            for name, wanted in reference.items()
        ]
        # A maximum may lose a NaN.
        worst = torch.stack(errors).nan_to_num(nan=torch.inf)
        dist.all_reduce(worst, dist.ReduceOp.MAX)
        return dict(zip(reference, worst.tolist(), strict=True))

    def times(self, steps: list[Callable[[], TrainStep]], iterations: int) -> list[list[float]]:
        """Milliseconds of forward, backward and both for each of ``steps``: median, of the slowest rank."""
        rows: list[list[list[float]]] = [[] for _ in steps]
        for _ in range(iterations):
            # In turn, so that what else runs on the machine meets all of them alike.
            for step, times in zip(steps, rows, strict=True):
                dist.barrier()
                if self.device.type == "cuda":
                    torch.cuda._sleep(HEAD_START)
                slowest = torch.tensor(step().milliseconds(), dtype=torch.float64, device=self.device)
                dist.all_reduce(slowest, dist.ReduceOp.MAX)
                times.append(slowest.tolist())
        return [[statistics.median(column) for column in zip(*times, strict=True)] for times in rows]


def logits_and_loss(
    model: nn.Module, tokens: Tensor, labels: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    logits = model(tokens, cos, sin)
    exact = logits if logits.dtype == torch.float64 else logits.float()
    return logits.detach(), F.cross_entropy(exact.flatten(0, 1), labels.flatten())


def full_tensor(t: Tensor) -> Tensor:
    return t.full_tensor() if isinstance(t, DTensor) else t


def mark(device: torch.device) -> Any:
    """A point in time: of the GPU's stream, or now."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def gradients(model: nn.Module) -> dict[str, Tensor]:
    found = dict(model.named_parameters())
    missing = [name for name, t in found.items() if t.grad is None]
    if missing:
        raise RuntimeError(f"no gradient of {', '.join(missing)}")
    return {f"gradient of {name}": t.grad for name, t in found.items() if t.grad is not None}
