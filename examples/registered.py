"""What people build first on registered tensors: blocks that go round a ring, a pipeline's stages.

    torchrun --nproc-per-node 4 examples/registered.py     # one rank a GPU; where there are fewer, CPU ranks

- Attention over keys and values that are cut along the sequence: each rank's block goes round the ring beside compute.
- All-gather + matmul on the same ring.
- A pipeline of one stage a rank: activations go forwards and gradients backwards, several microbatches.

Each is compared with the whole of it in float64; the exit status is 1 if one is further from it than it may be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F
from weft import symm_mem

TURNS, MICROBATCHES = 3, 4
LIMIT = 2e-5  # relative, in norm, of float32


class Ring:
    """Blocks of one shape and dtype that go round: every rank uses each of them, its own one first."""

    def __init__(self, like: Tensor, group: dist.ProcessGroup) -> None:
        self.rank, self.size = group.rank(), group.size()
        self.left, self.right = (self.rank - 1) % self.size, (self.rank + 1) % self.size
        # Two: a block that came is used, and sent on, while the next one comes.
        self.boxes = symm_mem.register([torch.empty_like(like), torch.empty_like(like)], group)
        self.side = torch.cuda.Stream() if like.is_cuda else None

    def blocks(self, mine: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(whose it is, the block): the next one comes while the body of the loop uses this one."""
        block = mine
        for step in range(self.size):
            box = self.boxes[step % 2]
            if step + 1 < self.size:
                with self._beside():
                    box.signal(self.left)  # all that used it, two steps ago, is done
                    box.put(block, self.right)
                    box.wait(self.left)
            yield (self.rank - step) % self.size, block
            if self.side is not None:
                torch.cuda.current_stream().wait_stream(self.side)
            block = box.tensor

    @contextmanager
    def _beside(self) -> Iterator[None]:
        if self.side is None:
            yield
            return
        self.side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.side):
            yield


def ring_attention(q: Tensor, kv: Tensor, ring: Ring) -> Tensor:
    """q [heads, rows, dim] of this rank, kv [2, heads, rows, dim] likewise: attention of q over all ranks' kv."""
    top = q.new_full(q.shape[:-1], -torch.inf)
    total, out = torch.zeros_like(top), torch.zeros_like(q)
    for _, (k, v) in ring.blocks(kv):
        scores = q @ k.mT / q.shape[-1] ** 0.5
        most = torch.maximum(top, scores.amax(-1))
        weights, before = (scores - most[..., None]).exp(), (top - most).exp()
        total = total * before + weights.sum(-1)
        out = out * before[..., None] + weights @ v
        top = most
    return out / total[..., None]


def ring_all_gather_matmul(x: Tensor, w: Tensor, ring: Ring) -> Tensor:
    """x [rows, K] of this rank, w [K, N]: all_gather(x) @ w."""
    y = x.new_empty(ring.size, x.shape[0], w.shape[1])
    for rank, block in ring.blocks(x):
        torch.mm(block, w, out=y[rank])
    return y.flatten(0, 1)


class Stage:
    """A rank's part of a pipeline: it gets activations from the rank before and gradients from the one after."""

    def __init__(self, layer: torch.nn.Module, like: Tensor, group: dist.ProcessGroup) -> None:
        self.layer, self.rank, self.last = layer, group.rank(), group.size() - 1
        self.activations, self.gradients = symm_mem.register(
            [torch.empty_like(like), torch.empty_like(like)], group
        )

    def forward(self, x: Tensor | None) -> tuple[Tensor, Tensor]:
        """(input, output); ``x`` is the first stage's input."""
        if self.rank > 0:
            self.activations.signal(self.rank - 1)
            self.activations.wait(self.rank - 1)
            x = self.activations.tensor.clone()
        assert x is not None
        x = x.detach().requires_grad_()
        y = self.layer(x)
        if self.rank < self.last:
            self.activations.put(y, self.rank + 1)
        return x, y

    def backward(self, x: Tensor, y: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
        if self.rank < self.last:
            self.gradients.signal(self.rank + 1)
            self.gradients.wait(self.rank + 1)
            y.backward(self.gradients.tensor)
        else:
            loss(y).backward()
        if self.rank > 0:
            assert x.grad is not None
            self.gradients.put(x.grad, self.rank - 1)


def gathered(x: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return [part.double() for part in parts]


def check_attention(group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    q, kv = torch.randn(2, 24, 16, device=device), torch.randn(2, 2, 24, 16, device=device)
    ring = Ring(kv, group)
    for _ in range(TURNS):
        out = ring_attention(q, kv, ring)
    k, v = torch.cat(gathered(kv), dim=2)
    return out, F.scaled_dot_product_attention(q.double()[None], k[None], v[None])[0]


def check_gather(group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    x, w = torch.randn(33, 20, device=device), torch.randn(20, 17, device=device)
    ring = Ring(x, group)
    for _ in range(TURNS):
        y = ring_all_gather_matmul(x, w, ring)
    return y, torch.cat(gathered(x)) @ w.double()


def check_pipeline(group: dist.ProcessGroup, device: torch.device) -> tuple[Tensor, Tensor]:
    torch.manual_seed(5)
    layers = [torch.nn.Linear(12, 12).to(device) for _ in range(group.size())]
    batches = [torch.randn(7, 12).to(device) for _ in range(MICROBATCHES)]
    stage = Stage(layers[group.rank()], batches[0], group)
    passed = [stage.forward(batch) for batch in batches]
    for x, y in passed:
        stage.backward(x, y, lambda out: out.square().sum())
    found = layers[group.rank()].weight.grad
    whole = torch.nn.Sequential(*layers).double()
    whole.zero_grad()
    for batch in batches:
        whole(batch.double()).square().sum().backward()
    expected = layers[group.rank()].weight.grad
    assert found is not None and expected is not None
    return found, expected


def main() -> None:
    if "LOCAL_RANK" not in os.environ:
        sys.exit("registered.py runs on several ranks: torchrun --nproc-per-node 4 examples/registered.py")
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", device_id=device if on_gpus else None)
    failed = False
    for check in (check_attention, check_gather, check_pipeline):
        found, expected = check(dist.distributed_c10d._get_default_group(), device)
        error = ((found - expected).norm() / expected.norm()).to(device)
        dist.all_reduce(error, dist.ReduceOp.MAX)
        failed |= not error.item() <= LIMIT
        if dist.get_rank() == 0:
            print(f"{check.__name__.removeprefix('check_'):<10} relative error {error.item():.1e}")
    if dist.get_rank() == 0:
        print("FAILED" if failed else "ok")
    dist.destroy_process_group()
    sys.exit(failed)


if __name__ == "__main__":
    main()
