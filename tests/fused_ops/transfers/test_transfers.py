"""put, get, signal and wait of registered tensors in torch.ops.weft: eager, compiled, and what they refuse."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed._functional_collectives as funcol
from opcommon import world
from ranks import on_ranks, run_ranks
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from weft import symm_mem
from weft.fused_ops.transfers import transfer_ops
from weft.passes import fusion_report

ops = torch.ops.weft
Handle = symm_mem.RegisteredTensor


def sent(turn: int, rank: int, *sizes: int) -> Tensor:
    return torch.arange(float(torch.Size(sizes).numel())).view(sizes) + 100.0 * turn + 10 * rank


def eager(rank: int, world_size: int) -> None:
    right, left, name = (rank + 1) % world_size, (rank - 1) % world_size, world().group_name
    arena = symm_mem.empty(12)
    x, y, z = symm_mem.register([torch.zeros(3, 4).t(), arena.view(4, 3), torch.zeros(2 + rank)])
    for turn in range(3):
        ops.signal(x.tensor, left, name)
        ops.batch_signal([y.tensor, z.tensor], [left, left], name)
        ops.put(x.tensor, sent(turn, rank, 4, 3), right, name)
        sources = [sent(turn, rank, 4, 3) + 1, sent(turn, rank, *z.shapes[right])]
        ops.batch_put([y.tensor, z.tensor], sources, [right, right], name)
        version = x.tensor._version
        ops.wait(x.tensor, left, name, group_size=world_size)
        assert x.tensor._version > version, "autograd must know that it has changed"
        version = z.tensor._version
        ops.batch_wait([y.tensor, z.tensor], [left, left], name)
        assert z.tensor._version > version
        assert torch.equal(x.tensor, sent(turn, left, 4, 3))
        assert torch.equal(y.tensor, sent(turn, left, 4, 3) + 1)
        assert torch.equal(z.tensor, sent(turn, left, 2 + rank))
        ops.signal(y.tensor, left, name)
        out = torch.full((4, 3), float("nan"), dtype=torch.complex64).imag
        ops.get(y.tensor, out, right, name)
        ops.wait(y.tensor, left, name)
        assert torch.equal(out, sent(turn, rank, 4, 3) + 1)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_ops_are_calls_of_the_handles(world_size: int) -> None:
    run_ranks(eager, world_size)


def step(x: Handle, y: Handle, a: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    right, left = (x.rank + 1) % x.world_size, (x.rank - 1) % x.world_size
    before = x.tensor.sum()
    symm_mem.batch_signal([(x, left), (y, left)])
    symm_mem.batch_put([(x, a * w.detach(), right), (y, a[:2], right)])
    symm_mem.batch_wait([(x, left), (y, left)])
    z = (x.tensor.clone() * w).sin() + y.tensor[0]
    x.signal(left)
    x.put(a + 64, right)
    x.wait(left)
    y.signal(left)
    out = y.get(torch.empty(2, 5), right)
    y.wait(left)
    return before, z, (x.tensor * w).cos(), out


def compiled(rank: int, world_size: int) -> None:
    """Also what a backward needs of a tensor is what it held then, whoever has written to it since."""
    right, left = (rank + 1) % world_size, (rank - 1) % world_size
    x, y = symm_mem.register([torch.zeros(9, 5)[4:8], torch.zeros(2, 5)])
    w = torch.full((5,), 0.5, requires_grad=True)
    made = torch.compile(lambda a: step(x, y, a, w), fullgraph=True)
    for turn in range(3):
        before, z, u, out = made(sent(turn, rank, 4, 5))
        assert before == -77.0 * 20 * (turn > 0)
        assert torch.equal(out, sent(turn, rank, 4, 5)[:2])
        first = sent(turn, left, 4, 5).double() / 2
        second = sent(turn, left, 4, 5).double() + 64
        assert torch.equal(x.tensor, second.float())
        x.signal(left)
        x.put(torch.full((4, 5), -77.0), right)
        x.wait(left)
        w.grad = None
        (z.sum() + u.sum()).backward()
        # Arguments of sin and cos are exact; each is right to 2^-22, and the largest sum has 8 terms.
        torch.testing.assert_close(z.double(), (first / 2).sin() + 2 * first[0], rtol=2**-22, atol=2**-21)
        torch.testing.assert_close(u.double(), (second / 2).cos(), rtol=0, atol=2**-21)
        terms = torch.cat([(first / 2).cos() * first, -(second / 2).sin() * second])
        bound = (torch.cat([first, second]).abs().sum(0) * 2**-20).max().item()
        assert w.grad is not None
        torch.testing.assert_close(w.grad.double(), terms.sum(0), rtol=0, atol=bound)


def test_compiled_calls_are_those_of_the_program() -> None:
    run_ranks(compiled, 2)


@pytest.mark.slow
@on_ranks(3, fresh=True)
def test_transfers_beside_fused_collectives(rank: int, world_size: int) -> None:
    """Ranks put into different ones, and agree on what is fused all the same."""
    right, left, group = (rank + 1) % world_size, (rank - 1) % world_size, world()
    (x,) = symm_mem.register([torch.zeros(64, 32)])
    w = torch.ones(32, 48)

    def step(a: Tensor) -> tuple[Tensor, Tensor]:
        x.signal(left)
        x.put(a, right)
        y = funcol.all_gather_tensor(a, 0, group) @ w
        x.wait(left)
        return y, funcol.all_reduce(x.tensor @ w, "sum", group)

    made = torch.compile(step, backend="weft", fullgraph=True)
    for turn in range(3):
        y, z = made(torch.full((64, 32), float(10 * turn + rank)))
        rows = torch.arange(float(world_size)).add(10 * turn).repeat_interleave(64)
        assert torch.equal(y, (32 * rows)[:, None].expand(-1, 48))
        assert (z == 32 * (10 * turn * world_size + sum(range(world_size)))).all()
    assert fusion_report().details().endswith("2 of 2 collectives fused"), fusion_report()


def refused(call: Any) -> str:
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


@on_ranks(2)
def test_fake_and_real_refuse_the_same(rank: int, world_size: int) -> None:
    name = world().group_name
    (x,) = symm_mem.register([torch.zeros(2, 3)])
    t, like, wide, one = x.tensor, torch.zeros(2, 3), torch.zeros(2, 3).double(), torch.zeros(1, 1)
    calls: dict[str, Any] = {
        r"peer: is 2, must be a rank from 0 to 1": lambda t, f: ops.signal(t, 2, name),
        r"peer: is -1, must": lambda t, f: ops.wait(t, -1, name),
        r"peers\[1\]: is 5, must": lambda t, f: ops.batch_put([t, t], [f(like)] * 2, [0, 5], name),
        r"source: is torch.float64\[2, 3\] on cpu, must be as x, torch.float32": lambda t, f: ops.put(
            t, f(wide), 0, name
        ),
        r"out: has strides \(0, 0\), its elements": lambda t, f: ops.get(t, f(one).expand(2, 3), 0, name),
        r"sources, peers: are 1 and 2, must be as many": lambda t, f: ops.batch_put(
            [t, t], [f(like)], [0, 1], name
        ),
        r"peers: are 1, must be as many as xs, 2": lambda t, f: ops.batch_wait([t, t], [0], name),
        r"peers\[0\]: is 7, must be a rank": lambda t, f: ops.batch_signal([t], [7], name),
        r"x: requires a gradient": lambda t, f: ops.signal(t.detach().requires_grad_(), 0, name),
        r"out: requires a gradient": lambda t, f: ops.get(t, f(like).requires_grad_(), 0, name),
        r"group_size: is 3, must be 2": lambda t, f: ops.signal(t, 0, name, group_size=3),
        r"no process group is named 'nobody'": lambda t, f: ops.put(t, f(like), 0, "nobody"),
    }
    for said, call in calls.items():
        real = refused(lambda call=call: call(t, lambda given: given.clone()))
        with FakeTensorMode() as mode:
            fake = refused(lambda call=call: call(mode.from_tensor(t), mode.from_tensor))
        assert real == fake
        with pytest.raises((ValueError, TypeError), match=said):
            call(t, lambda given: given.clone())
    only_real = {
        r"x: float32\[2, 3\] is not registered in group '0', must be": lambda: ops.put(like, like, 0, name),
        r"xs\[1\]: float32\[2\] is not registered": lambda: ops.batch_put(
            [t, like[0, :2]], [like, like[0, :2]], [0, 0], name
        ),
        r"source: .*\[3\] on cpu, must be as the tensor of rank 0, torch.float32\[2, 3\]": lambda: ops.put(
            t, like[0], 0, name
        ),
        "source: is torch.sparse_coo, must be strided": lambda: x.put(like.to_sparse(), 0),
        "out: is torch.sparse_coo, must be strided": lambda: x.get(like.to_sparse(), 0),
        r"puts\[1\]: is of the same tensor and rank as puts\[0\]": lambda: ops.batch_put(
            [t, t], [like, like], [0, 0], name
        ),
    }
    for said, call in only_real.items():
        with pytest.raises(ValueError, match=said):
            call()
    with pytest.raises(NotImplementedError, match="put: has no rule for vmap"):
        torch.func.vmap(lambda source: ops.put(t, source, 0, name))(torch.zeros(2, 2, 3))
    mesh = init_device_mesh("cpu", (world_size,))
    with pytest.raises(TypeError, match="put: is given a DTensor, must be given what this rank holds"):
        ops.put(t, distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)]), 0, name)
    compiled = torch.compile(lambda: ops.signal(t, 0, name), backend="aot_eager")
    with pytest.raises(Exception, match=r"is not registered .* or copies \(as backend='aot_eager' does\)"):
        compiled()
    x.signal(1 - rank)  # nothing of that was counted
    x.put(like + 1, 1 - rank)
    x.wait(1 - rank)


@on_ranks(2, fresh=True)
def test_opcheck(rank: int, world_size: int) -> None:
    """opcheck copies the tensors, so the handle is found by no address here."""
    (x,) = symm_mem.register([torch.zeros(3)])
    t, source, name = x.tensor, torch.ones(3), world().group_name
    for _ in range(60):
        x.signal(rank)
    for _ in range(30):
        x.put(source, rank)
    with mock.patch.object(transfer_ops, "registered_as", return_value=x):
        torch.library.opcheck(ops.signal, (t, rank, name))
        torch.library.opcheck(ops.put, (t, source, rank, name))
        torch.library.opcheck(ops.put, (t, source.requires_grad_(), rank, name))
        torch.library.opcheck(ops.batch_put, ([t], [source.detach()], [rank], name))
        torch.library.opcheck(ops.batch_signal, ([t], [rank], name))
        torch.library.opcheck(ops.batch_wait, ([t], [rank], name))
        torch.library.opcheck(ops.get, (t, torch.zeros(3), rank, name), {"group_size": world_size})
        torch.library.opcheck(ops.wait, (t, rank, name))
    symm_mem.reset()
