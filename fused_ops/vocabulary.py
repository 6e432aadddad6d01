"""Losses and log-probabilities of logits whose columns the ranks share, as functions; functional.py has the others."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels.linear_cross_entropy.reference import Loss
from ..symm_mem import Group, group_name, resolve_group
from . import validation
from .dispatch.callers import of_graph, refuse_child_of
from .dispatch.tensor_guards import may_look_at
from .library import schema
from .ops.vocabulary.linear_cross_entropy import LINEAR_CROSS_ENTROPY, LinearCrossEntropyCall

_REDUCTIONS = ("none", "mean", "sum")


def fused_linear_cross_entropy(
    x: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    group: Group = None,
    *,
    vocab_start: int | None = None,
    sequence_dim: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """``cross_entropy(x @ weight.t() + bias, targets)`` of a vocabulary that the ranks share.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_linear_cross_entropy
    >>> x, targets = torch.ones(5, 8), torch.tensor([0, 3, 1, 2, -100])  # the same on every rank
    >>> weight = torch.zeros(4, 8).requires_grad_()  # this rank's 4 rows of the weight, of 4 * W
    >>> loss = fused_linear_cross_entropy(x, weight, targets)
    >>> torch.testing.assert_close(loss, torch.tensor(4.0 * dist.get_world_size()).log())
    >>> loss.backward()

    No rank has all logits: each makes its own columns, of 2048 rows at a time, or where it makes the weight's gradient
    of H rows if these are more. The first such chunk lies in the memory of that gradient. The ranks send each other two
    float32 numbers of each row (four with ``label_smoothing``), by one all-gather a call, or for "mean" and "sum" one a
    chunk. There the gradients of x and weight are made in the forward, while a chunk's logits are there: three products
    in all. So the backward can run once only. For "none" the backward makes the logits again, a fourth product.

    Logits are rounded to x's dtype; all else is float32. Gradients of logits are rounded to x's dtype too, and that of
    the weight after every chunk, as the sum of parts of a batch is, each time by half a unit in the last place of the
    sum so far: a sum in float32 would take twice the weight's memory. That of x is rounded twice where the first chunk
    has more than 8192 columns. An infinite factor leaves it 0 where a row is ignored. Every rank gets the same bits.

    Differentiable once. Works under torch.compile. Every rank must call it with the same shapes, but for V, and want
    the same gradients.

    Args:
        x: [..., H], 2 or more dimensions; float32, bfloat16 or float16. The same on all ranks, whose gradients are
            summed; or with ``sequence_dim`` this rank's part, whose gradient is scattered.
        weight_shard: [V, H], of x's dtype: this rank's rows of the weight of nn.Linear. V may differ between ranks: of
            rows that only fill up a vocabulary give none, as in ``weight[:n]``.
        targets: [...], int64: of all rows, the same on all ranks; columns of the whole vocabulary.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        vocab_start: the first column of this rank. None: the ranks' columns follow each other in rank order, and they
            tell each other how many they have, by an all-gather of one number. All ranks pass one or none does.
        sequence_dim: the dimension of x, not the last one, of which each rank has a part; it is gathered first, since
            the weight's gradient takes all of x.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        ignore_index: a target whose rows count nothing.
        label_smoothing: from 0 to 1, as in torch.nn.functional.cross_entropy.
        z_loss: what the square of each row's ``logsumexp`` is weighed with; it is added to the row's loss.
        softcap: logits are ``softcap * tanh(logits / softcap)``.
        temperature: what they are then divided by.
        bias: [V], of x's dtype: this rank's part.

    Returns:
        float32: a number, or [...]. Infinite where a target is no column of any rank; in the checked mode
        (``symm_mem.set_checked``) such targets are refused.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout: as ``fused_all_gather_matmul``.
        NotImplementedError: a second gradient is asked for.
    """
    _tensors(bias, targets, x=x, weight_shard=weight_shard)
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss)
    named = _scored(vocab_start, softcap, temperature)
    given, summed = (weight_shard, bias, targets, group_name(group)), reduction != "none"
    named |= {"partial_x": sequence_dim is not None, **_of_loss(loss), **of_graph(given[-1])}
    whole = _gathered("fused_linear_cross_entropy", x, sequence_dim, given, named)
    # Of float16, a mean's gradients of logits may be too small for numbers: then it is divided at the end.
    mean = reduction == "mean" and x.dtype != torch.float16
    values, bounds, _ = schema.linear_cross_entropy(whole, *given, summed=summed, mean=mean, **named)
    _check_targets(targets, bounds, ignore_index)
    if not summed:
        return _rows(loss, values, targets)
    return values if mean or reduction == "sum" else values / (targets != ignore_index).sum()


def fused_linear_log_probs(
    x: Tensor,
    weight_shard: Tensor,
    targets: Tensor,
    group: Group = None,
    *,
    vocab_start: int | None = None,
    sequence_dim: int | None = None,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
    bias: Tensor | None = None,
    return_entropy: bool = False,
) -> Any:
    """The targets' ``log_softmax(x @ weight.t() + bias)``, and each row's entropy, of logits that no rank ever has.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import fused_linear_log_probs
    >>> x, weight = torch.ones(3, 8), torch.zeros(4, 8)  # all ranks' x, and this rank's rows of the weight
    >>> log_probs, entropy = fused_linear_log_probs(x, weight, torch.tensor([0, 3, 1]), return_entropy=True)
    >>> columns = 4.0 * dist.get_world_size()
    >>> torch.testing.assert_close(log_probs, -torch.tensor([columns] * 3).log())
    >>> torch.testing.assert_close(entropy, torch.tensor([columns] * 3).log())

    As ``fused_linear_cross_entropy`` with ``reduction="none"``; an entropy is a third number of each row that is sent.

    Args:
        x: [..., H], as for ``fused_linear_cross_entropy``.
        weight_shard: [V, H], this rank's rows.
        targets: [...], int64.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        vocab_start: the first column of this rank; None: after those of the ranks before.
        sequence_dim: the dimension of x of which each rank has a part.
        ignore_index: a target whose rows get 0, for log-probability and entropy.
        softcap: logits are ``softcap * tanh(logits / softcap)``.
        temperature: what they are then divided by.
        bias: [V], of x's dtype: this rank's part.
        return_entropy: whether ``-sum(p * log(p))`` of each row is wanted, too.

    Returns:
        log-probabilities [...], float32, -inf where a target is no column of any rank; with ``return_entropy``
        (log-probabilities, entropies [...]).

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout, NotImplementedError: as ``fused_linear_cross_entropy``.
    """
    _tensors(bias, targets, x=x, weight_shard=weight_shard)
    _loss("none", ignore_index, 0.0, 0.0)
    named = _scored(vocab_start, softcap, temperature)
    validation.flags(return_entropy=return_entropy)
    given, extra = (weight_shard, bias, targets, group_name(group)), "entropy" if return_entropy else ""
    named |= {"partial_x": sequence_dim is not None, "extra": extra, "ignore_index": ignore_index}
    whole = _gathered("fused_linear_log_probs", x, sequence_dim, given, named)
    values, bounds, _ = schema.linear_log_probs(whole, *given, **named, **of_graph(given[-1]))
    _check_targets(targets, bounds, ignore_index)
    counts = targets != ignore_index
    log_probs = (values[1] - values[0]).view(targets.shape).where(counts, 0)
    return (log_probs, values[2].view(targets.shape).where(counts, 0)) if return_entropy else log_probs


def cross_entropy_of_sharded_logits(
    logits_shard: Tensor,
    targets: Tensor,
    group: Group = None,
    *,
    vocab_start: int | None = None,
    reduction: str = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """``cross_entropy(logits, targets)`` of logits whose columns the ranks share, by one small all-gather.

    >>> import torch, torch.distributed as dist
    >>> from weft.fused_ops import cross_entropy_of_sharded_logits
    >>> logits = torch.zeros(3, 4).requires_grad_()  # this rank's columns
    >>> loss = cross_entropy_of_sharded_logits(logits, torch.tensor([0, 3, 1]))
    >>> torch.testing.assert_close(loss, torch.tensor(4.0 * dist.get_world_size()).log())
    >>> loss.backward()  # sends nothing

    Args:
        logits_shard: [..., V], 2 or more dimensions; float32, bfloat16 or float16. V may differ between ranks.
        targets: [...], int64: the same on all ranks; columns of the whole vocabulary.
        group: a group's name, a ProcessGroup, a 1-D DeviceMesh or (mesh, dim); None is the default group.
        vocab_start: the first column of this rank; None: after those of the ranks before.
        reduction: "mean" over the rows that are not ignored, "sum", or "none".
        ignore_index: a target whose rows count nothing.
        label_smoothing: from 0 to 1, as in torch.nn.functional.cross_entropy.
        z_loss: what the square of each row's ``logsumexp`` is weighed with; it is added to the row's loss.
        softcap: logits are ``softcap * tanh(logits / softcap)``.
        temperature: what they are then divided by.

    Returns:
        float32: a number, or [...], the same bits on every rank.

    Raises:
        ValueError, TypeError, RankMismatch, PeerTimeout, NotImplementedError: as ``fused_linear_cross_entropy``.
    """
    _tensors(None, targets, logits_shard=logits_shard)
    loss = _loss(reduction, ignore_index, label_smoothing, z_loss)
    named = _scored(vocab_start, softcap, temperature)
    name = group_name(group)
    named |= {**_of_loss(loss), **of_graph(name)}
    given = logits_shard, None, None, targets, name
    values, bounds, _ = schema.cross_entropy_of_sharded_logits(*given, **named)
    _check_targets(targets, bounds, ignore_index)
    rows = _rows(loss, values, targets)
    if reduction == "none":
        return rows
    return rows.sum() if reduction == "sum" else rows.sum() / (targets != ignore_index).sum()


def _tensors(bias: Any, targets: Any, **named: Any) -> None:
    for name, value in named.items():
        validation.tensor(name, value, 2)
    validation.tensor("targets", targets)
    if bias is not None:
        validation.tensor("bias", bias)


def _check_targets(targets: Tensor, bounds: Tensor, ignore_index: int) -> None:
    """In the checked mode, which may wait for data: they are columns of the vocabulary."""
    if not may_look_at(targets):
        return
    count = int(bounds[1])
    wrong = targets[((targets < 0) | (targets >= count)) & (targets != ignore_index)]
    if wrong.numel():
        raise ValueError(
            f"targets: holds {wrong[0].item()}, must be from 0 to {count - 1}, or ignore_index ({ignore_index})"
        )


def _loss(reduction: Any, ignore_index: Any, label_smoothing: Any, z_loss: Any) -> Loss:
    if not isinstance(reduction, str):
        raise TypeError(
            f"reduction: is {validation.type_text(reduction)}, must be {validation.one_of(_REDUCTIONS)}"
        )
    if reduction not in _REDUCTIONS:
        raise ValueError(f"reduction: is {reduction!r}, must be {validation.one_of(_REDUCTIONS)}")
    validation.integer("ignore_index", ignore_index)
    validation.number("label_smoothing", label_smoothing)
    validation.number("z_loss", z_loss)
    return Loss(ignore_index, float(label_smoothing), float(z_loss))


def _of_loss(loss: Loss) -> dict[str, Any]:
    of = {"ignore_index": loss.ignore_index, "label_smoothing": loss.label_smoothing, "z_loss": loss.z_loss}
    return {"extra": "mean" if loss.label_smoothing else "", **of}


def _scored(vocab_start: Any, softcap: Any, temperature: Any) -> dict[str, Any]:
    if vocab_start is not None:
        validation.integer("vocab_start", vocab_start)
    if softcap is not None:
        validation.number("softcap", softcap)
    validation.number("temperature", temperature)
    return {"vocab_start": vocab_start, "softcap": softcap, "temperature": temperature}


def _gathered(op: str, x: Tensor, sequence_dim: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Tensor:
    """x of all ranks. What else the op is given is refused before."""
    if sequence_dim is None:
        return x
    validation.dimension("sequence_dim", sequence_dim, "x", x.dim())
    if sequence_dim % x.dim() == x.dim() - 1:
        raise ValueError(f"sequence_dim: is {sequence_dim}, must not be the last dimension of x")
    if not torch.compiler.is_compiling():
        refuse_child_of(given[-1], op)
        shape = [*x.shape]
        shape[sequence_dim] *= resolve_group(given[-1]).size()
        LINEAR_CROSS_ENTROPY.validate(LinearCrossEntropyCall(x.new_empty(1).expand(shape), *given, **named))
    return schema.all_gather(x, sequence_dim, given[-1], **of_graph(given[-1]))


def _rows(loss: Loss, values: Tensor, targets: Tensor) -> Tensor:
    return loss.rows(values.view(values.shape[0], *targets.shape), targets)
