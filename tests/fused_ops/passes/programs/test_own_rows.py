"""Tensor-parallel models with the pass's sequence parallelism, and gathers that no product takes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import test_hugging_face as hugging_face
import test_layers_by_hand as by_hand
import torch
import torch.nn.functional as F
from compiled import BOUND, CODEGEN, Outcome, check, outcomes, program
from graphs import Copied, Reduced
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch_versions import GATHERS_ALONG_ANY, as_collectives_take

WORLD, HIDDEN, INNER, LAYERS = 2, 8, 12, 2
BY_ROWS = "of an all-reduce, sequence parallel"


def blocks(x: Tensor, p: list[Tensor], copy: by_hand.Collective, reduce: by_hand.Collective) -> Tensor:
    for first in range(0, len(p), 7):
        before, q, k, o, between, up, down = p[first : first + 7]
        y = copy(F.rms_norm(x, (HIDDEN,), before, 1e-6))
        x = x + reduce(((y @ q).sin() * (y @ k)) @ o)
        y = copy(F.rms_norm(x, (HIDDEN,), between, 1e-6))
        x = x + reduce(F.silu(y @ up) @ down)
    return x


def kept_bytes(x: Tensor, p: list[Tensor], fn: Any) -> tuple[Tensor, int]:
    """What a forward gives, and the bytes of what it keeps for the backward besides its inputs."""
    kept: dict[int, int] = {}
    given = {t.untyped_storage().data_ptr() for t in (x, *p)}

    def pack(t: Tensor) -> Tensor:
        if t.untyped_storage().data_ptr() not in given:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn(x, p)
    return y, sum(kept.values())


_DIMS = [None, 1, 1, 0, None, 1, 0]  # along which a layer's weights are sharded


def trained_weights(rank: int, layers: int) -> tuple[list[Tensor], list[Tensor], Tensor, Tensor]:
    """The weights of blocks and their input, whole in float64, and a rank's own: whole, own, x, own x."""
    shapes = [(HIDDEN,), (HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN), (HIDDEN,), (HIDDEN, INNER)]
    shapes.append((INNER, HIDDEN))
    *whole, x = by_hand.drawn(*shapes * layers, (2, 6, HIDDEN))
    dims = _DIMS * layers
    own = [w.float() if d is None else by_hand.mine(w, d, rank) for w, d in zip(whole, dims, strict=True)]
    given = x.float()
    for t in (*whole, *own, x, given):
        t.requires_grad_()
    return whole, own, x, given


def train(rank: int, world: int, setting: Any, regather: bool, codegen: bool) -> tuple[Outcome, int]:
    whole, own, x, given = trained_weights(rank, LAYERS)
    with program(codegen, sequence_parallel=setting, regather=regather) as run:
        compiled = run.compile(blocks)
        got, kept = kept_bytes(given, own, lambda x, p: compiled(x, p, Copied.apply, Reduced.apply))
        want = blocks(x, whole, by_hand.same, by_hand.same)
        run.compare("y", got, want)
        got.sin().sum().backward()
        want.sin().sum().backward()
        assert given.grad is not None and x.grad is not None
        run.compare("gradient of x", given.grad, x.grad)
        for i, (a, b, d) in enumerate(zip(own, whole, _DIMS * LAYERS, strict=True)):
            assert a.grad is not None and b.grad is not None
            run.compare(f"gradient {i}", a.grad, b.grad if d is None else b.grad.chunk(world, d)[rank])
        return run.outcome(), kept


@CODEGEN
def test_training(codegen: bool) -> None:
    """Each way two reductions a layer and as many gathers, and backward a sum of rows for each norm's weight; three of
    the four gathers of norms once more, where they are not kept."""
    without, with_it, again = (
        [*zip(*outcomes(train, WORLD, setting, regather, codegen), strict=True)]
        for setting, regather in ((False, False), (True, False), (True, True))
    )
    for (found, _), fused in ((without, 4 * LAYERS), (with_it, 20), (again, 20 + 3)):
        worst = max(error for outcome in found for error in outcome.errors.values())
        assert worst <= BOUND, worst
        assert {(o.fused, len(o.left)) for o in found} == {(fused, 0)}, found[0].text
    assert with_it[0][0].text.count(BY_ROWS) > 0
    # The residual stream, and then what products take, on own rows.
    assert again[1][0] < with_it[1][0] < without[1][0]


def train_on_some_rows(rank: int, world: int, codegen: bool) -> Outcome:
    """The same rows on all ranks, which on rank 0 are its own: in the joint graph a rank cannot tell them apart."""
    whole, own, x, given = trained_weights(rank, 1)

    def fn(x: Tensor, p: list[Tensor], copy: by_hand.Collective, reduce: by_hand.Collective) -> list[Tensor]:
        y = blocks(x, p, copy, reduce)
        return [y, y.detach()[:, :3]]

    with program(codegen, sequence_parallel=True) as run:
        got, rows = run.compile(fn)(given, own, Copied.apply, Reduced.apply)
        want, wanted_rows = fn(x, whole, by_hand.same, by_hand.same)
        run.compare("y", got, want)
        run.compare("rows", rows, wanted_rows)
        got.sin().sum().backward()
        want.sin().sum().backward()
        assert given.grad is not None and x.grad is not None
        run.compare("gradient of x", given.grad, x.grad)
        return run.outcome()


def test_training_on_rows_that_one_rank_has() -> None:
    found = outcomes(train_on_some_rows, WORLD, False)
    assert max(error for outcome in found for error in outcome.errors.values()) <= BOUND
    assert found[0].text.count(BY_ROWS) > 0
    assert len({(o.fused, len(o.left)) for o in found}) == 1, [o.text for o in found]


def train_with_an_embedding(rank: int, world: int, codegen: bool) -> Outcome:
    """Of which each rank has a part, and looks up its own tokens."""
    torch.manual_seed(os.getppid())
    whole, own, *_ = trained_weights(rank, 1)
    table, ids = by_hand.drawn((8, HIDDEN))[0], torch.randint(8, (2, 6))
    mine, given = by_hand.mine(table, 0, rank).requires_grad_(), table.requires_grad_()

    def fn(
        part: Tensor, first: int, p: list[Tensor], copy: by_hand.Collective, reduce: by_hand.Collective
    ) -> Tensor:
        others = (ids < first) | (ids >= first + len(part))
        found = F.embedding((ids - first).masked_fill(others, 0), part).masked_fill(others[..., None], 0)
        return copy(F.rms_norm(blocks(reduce(found), p, copy, reduce), (HIDDEN,), p[0])) @ p[1]

    with program(codegen, sequence_parallel=True) as run:
        got = run.compile(fn)(mine, rank * len(mine), own, Copied.apply, Reduced.apply)
        want = fn(given, 0, whole, by_hand.same, by_hand.same)
        run.compare("y", got, want.chunk(world, -1)[rank])
        got.sin().sum().backward()
        want.sin().sum().backward()
        assert mine.grad is not None and given.grad is not None
        run.compare("gradient of the embedding", mine.grad, given.grad.chunk(world)[rank])
        return run.outcome()


def test_training_of_an_embedding() -> None:
    """A rank's own tokens are no mask of all ranks: where it is used the backward has all rows."""
    found = outcomes(train_with_an_embedding, WORLD, False)
    assert max(error for outcome in found for error in outcome.errors.values()) <= BOUND
    assert found[0].text.count(BY_ROWS) > 1


def infer(rank: int, world: int, folder: Path, codegen: bool) -> Outcome:
    model, exact = hugging_face.load(folder, world)
    with program(codegen, sequence_parallel=True) as p, torch.no_grad():
        got = p.compile(model)(input_ids=hugging_face.tokens(), use_cache=False).logits
        p.compare("logits", got, exact(input_ids=hugging_face.tokens()).logits)
        return p.outcome()


@CODEGEN
def test_hugging_faces_llama(tmp_path: Path, codegen: bool) -> None:
    pytest.importorskip("transformers")
    found = outcomes(infer, WORLD, hugging_face.saved(tmp_path, "Llama"), codegen)
    # A reduction and a gather for each norm; and the gather of the logits.
    check(found, 2 * hugging_face.NORMS + 1, [])
    assert "all_reduce" not in {line.split()[2] for line in found[0].text.splitlines()[:-1]}, found[0].text


def decode(rank: int, world: int, codegen: bool) -> Outcome:
    return by_hand.decode(rank, world, codegen, sequence_parallel=True)


@CODEGEN
def test_a_decoder_of_vllm(codegen: bool) -> None:
    check(outcomes(decode, WORLD, codegen), 2 * (1 + 2 * by_hand.LAYERS), [])


def heads(x: Tensor, qkv: Tensor, norms: list[Tensor], head: Tensor, parts: int, rank: int) -> Tensor:
    """Queries and keys that are normed over all heads, of a packed product, and logits: gathers after products."""

    def whole(t: Tensor) -> Tensor:
        if parts == 1:
            return t
        # As vLLM gathers along the last dimension.
        y = funcol.all_gather_tensor(as_collectives_take(t), 0, by_hand.group()).unflatten(0, (parts, -1))
        return y.movedim(0, -2).flatten(-2)

    q, k, v = (x @ qkv).chunk(3, -1)
    q, k = (
        F.rms_norm(whole(t), (INNER,), w, 1e-6).chunk(parts, -1)[rank]
        for t, w in zip((q, k), norms, strict=True)
    )
    z = whole((q.sin() * k.cos() * v).sigmoid())
    logits = z @ head
    if parts == 1 or not GATHERS_ALONG_ANY:
        return whole(logits)
    return funcol.all_gather_tensor(logits, -1, by_hand.group())


def gather(rank: int, world: int, codegen: bool) -> Outcome:
    x, q, k, v, a, b, head = by_hand.drawn(
        (10, HIDDEN), *[(HIDDEN, INNER)] * 3, (INNER,), (INNER,), (INNER, 14)
    )
    packed = torch.cat([by_hand.mine(w, 1, rank) for w in (q, k, v)], 1)
    with program(codegen) as run, torch.no_grad():
        own = by_hand.mine(head, 1, rank)
        got = run.compile(heads)(x.float(), packed, [a.float(), b.float()], own, world, rank)
        run.compare("logits", got, heads(x, torch.cat([q, k, v], 1), [a, b], head, 1, 0))
        return run.outcome()


@CODEGEN
def test_gathers_after_products(codegen: bool) -> None:
    found = outcomes(gather, WORLD, codegen)
    check(found, 4, [])
    # But for the one before the head. Queries and keys are alike.
    lines = found[0].text.splitlines()
    assert sum("one_shot_all_gather, dim 1" in line for line in lines) == 2, lines
    assert sum("(2 times)" in line for line in lines) == 1, lines
