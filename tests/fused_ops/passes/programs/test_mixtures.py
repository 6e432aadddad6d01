"""Mixtures of experts in training with the pass's sequence parallelism: what is sent, and what is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import test_layers_by_hand as by_hand
import torch
import torch.nn.functional as F
from compiled import BOUND, Outcome, outcomes, program
from test_own_rows import BY_ROWS, Copied, Reduced
from torch import Tensor, fx
from torch._inductor import config as inductor_config
from weft.fused_ops.passes.graph.nodes import c10d, val
from weft.fused_ops.passes.graph.sizes import nbytes

WORLD, HIDDEN, INNER, EXPERTS, LAYERS = 2, 8, 12, 4, 2
SHAPE = (2, 12, HIDDEN)
ATTENTION = [(HIDDEN,), (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN,)]
_DIMS = [None, 1, 1, 0, None]  # along which these are sharded
Collective = Callable[[Tensor], Tensor]
Gates = Callable[[Tensor, Tensor, Collective], Tensor]


def top_two(y: Tensor, router: Tensor, copy: Collective) -> Tensor:
    """As Hugging Face's plan has it: the gradient of the gates is reduced, that of the router's input is whole."""
    return copy(unreduced(y, router, copy))


def unreduced(y: Tensor, router: Tensor, copy: Collective) -> Tensor:
    """Each rank adds the gradient of its part of the experts' sum alone."""
    top, at = (y @ router).softmax(-1).topk(2, -1)
    return torch.zeros_like(y[..., :EXPERTS]).scatter(-1, at, top / top.sum(-1, keepdim=True))


def of_its_experts(y: Tensor, router: Tensor, copy: Collective) -> Tensor:
    """``router`` has the columns of the experts that the rank has."""
    return (copy(y) @ router).sigmoid()


def layers(x: Tensor, p: list[Tensor], gates: Gates, copy: Collective, reduce: Collective) -> Tensor:
    count = 6 + 2 * (EXPERTS // WORLD if gates is of_its_experts else EXPERTS)
    for first in range(0, len(p), count):
        before, q, k, o, between, router, *experts = p[first : first + count]
        y = copy(F.rms_norm(x, (HIDDEN,), before, 1e-6))
        x = x + reduce(((y @ q).sin() * (y @ k)) @ o)
        y = F.rms_norm(x, (HIDDEN,), between, 1e-6)
        shares, y = gates(y, router, copy), copy(y)
        each = zip(shares.unbind(-1), experts[::2], experts[1::2], strict=True)
        x = x + reduce(sum(share[..., None] * (F.silu(y @ up) @ down) for share, up, down in each))
    return x


def weights(rank: int, gates: Gates) -> list[Tensor]:
    """A rank's own, in float64."""
    own, apart = [], gates is of_its_experts
    for _ in range(LAYERS):
        for w, dim in zip(by_hand.drawn(*ATTENTION), _DIMS, strict=True):
            own.append(w if dim is None else w.chunk(WORLD, dim)[rank])
        router, *experts = by_hand.drawn((HIDDEN, EXPERTS), *[(HIDDEN, INNER), (INNER, HIDDEN)] * EXPERTS)
        if apart:
            half = len(experts) // WORLD
            own += [router.chunk(WORLD, 1)[rank], *experts[rank * half : (rank + 1) * half]]
        else:
            own += [router, *(w.chunk(WORLD, 1 - i % 2)[rank] for i, w in enumerate(experts))]
    return own


@dataclass
class Sent:
    """Counts the bytes that the graphs' collectives send, in parts of a rank: a pass of the user's own."""

    bytes: int = 0

    def __call__(self, graph: fx.Graph) -> None:
        for target, times in ((c10d.all_reduce, 2), (c10d.reduce_scatter_tensor, 1)):
            for node in graph.find_nodes(op="call_function", target=target.default):
                self.bytes += times * nbytes(val(node.args[0]))
        for node in graph.find_nodes(op="call_function", target=c10d.all_gather_into_tensor.default):
            self.bytes += nbytes(val(node))


def train(rank: int, world: int, gates: Gates, setting: bool, codegen: bool) -> tuple[Outcome, int]:
    exact = weights(rank, gates)
    own = [w.float() for w in exact]
    (x,) = by_hand.drawn(SHAPE)
    given = x.float()
    for t in (*exact, *own, x, given):
        t.requires_grad_()
    sent = Sent()
    with program(codegen, sequence_parallel=setting) as run:
        with inductor_config.patch(run.fusion.options_with(sent)):
            got = run.compile(layers)(given, own, gates, Copied.apply, Reduced.apply)
            got.sin().sum().backward()
        want = layers(x, exact, gates, Copied.apply, Reduced.apply)
        want.sin().sum().backward()
        run.compare("y", got, want)
        for i, (a, b) in enumerate(zip((given, *own), (x, *exact), strict=True)):
            assert a.grad is not None and b.grad is not None
            run.compare(f"gradient {i}", a.grad, b.grad)
        return run.outcome(), sent.bytes


@pytest.mark.parametrize("gates", [top_two, of_its_experts, unreduced])
def test_training(gates: Gates) -> None:
    """Computed is what the program computes on each rank, and no more is sent: on own rows, but where the gradient of
    the router's input may be each rank's own."""
    plain, with_it = (outcomes(train, WORLD, gates, setting, False) for setting in (False, True))
    errors = {
        f"rank {i}, {n}": e for i, (o, _) in enumerate(with_it) for n, e in o.errors.items() if e > BOUND
    }
    assert not errors
    for (before, sent_before), (after, sent) in zip(plain, with_it, strict=True):
        assert 0 < sent <= 1.05 * sent_before, (sent, sent_before)
        assert (BY_ROWS in after.text) == (gates is not unreduced), after.text
        assert ("not sequence parallel: it would send 1." in after.text) == (gates is unreduced), after.text
        assert not before.left and not after.left
        alike = "; ranks may not have "
        assert (alike in after.text) == (gates is unreduced), after.text
