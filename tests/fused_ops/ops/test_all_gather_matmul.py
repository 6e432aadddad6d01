"""fused_all_gather_matmul on real CPU processes, against float64."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from opcommon import DEVICES, assert_fused, cells, check, gather, poison, refuses, same_on_all, world
from ranks import on_ranks
from references import held
from weft.fused_ops import fused_all_gather_matmul
from weft.fused_ops.dispatch.plan import forced

SHAPES = [  # A_shard, gather_dim, columns of the Bs
    ((5, 7), 0, [11]),
    ((5, 7), -2, [3, 1, 8]),
    ((1, 16), 0, [16]),
    ((6, 3), 1, [5, 4]),
    ((2, 1), 1, [3]),
    ((2, 9, 6), 1, [10]),
    ((1, 9, 6), 1, [10, 2]),
    ((3, 4, 5), 0, [6]),
    ((3, 4, 5), -1, [6]),
    ((2, 3, 4, 5), 2, [7]),
    ((0, 7), 0, [4]),
    ((130, 257), 0, [65]),
    ((130, 264), 0, [72, 8]),
    ((2, 70, 64), 1, [128]),
]


@pytest.mark.parametrize(
    ("world_size", "device", "shape", "dim", "columns", "dtype"), cells([1, 2, 3, 4], SHAPES)
)
@on_ranks(None, device=None)
def test_fused_all_gather_matmul(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int, columns: list[int], dtype: torch.dtype
) -> None:
    for return_A in (True, False):
        poison(rank)
        shard = torch.randn(*shape).to(dtype)
        k = shape[-1] * (world_size if dim in (-1, len(shape) - 1) else 1)
        given = {"A_shard": shard, "Bs": [torch.randn(k, n).to(dtype) for n in columns], "gather_dim": dim}
        with forced("fused"):
            A, outs = held(fused_all_gather_matmul, **given, group=world(), return_A=return_A)
            again = fused_all_gather_matmul(**given, group=world(), return_A=return_A)[1]
        if world_size > 1 and shard.numel():
            assert_fused()
        assert (A is None) == (not return_A) and all(out.dtype == dtype for out in outs)
        assert A is None or torch.equal(A.double(), torch.cat(gather(shard), dim))
        assert all(torch.equal(a, b) for a, b in zip(outs, again, strict=True)), "other bits in another run"


@on_ranks(2)
def test_sums_in_float32(rank: int, world_size: int) -> None:
    """Of products along the last dimension, in float32: 257 is no bfloat16, and the other rank leaves 1 of it."""
    for dtype, large in ((torch.bfloat16, 256.0), (torch.float16, 2048.0)):
        shard = torch.tensor([[-large, 0.0] if rank else [large, 1.0]], dtype=dtype)
        _, (out,) = fused_all_gather_matmul(shard, [torch.ones(4, 3, dtype=dtype)], 1, world())
        assert_fused()
        assert out.flatten().tolist() == [1.0] * 3


@pytest.mark.parametrize(("shape", "dim", "columns"), SHAPES)
@on_ranks(2, device=DEVICES)
def test_any_strides_in_and_torchs_strides_out(
    rank: int, world_size: int, shape: tuple[int, ...], dim: int, columns: list[int]
) -> None:
    name = world().group_name
    base = torch.randn(*[2 * s for s in shape])
    shard = base[tuple(slice(0, 2 * s, 2) for s in shape)].to(torch.float32)
    assert shard.numel() == 0 or not shard.is_contiguous() or max(shape) == 1
    A = torch.cat(gather(shard), dim)
    Bs = [torch.randn(n, A.shape[-1]).t() for n in columns]
    with torch._subclasses.FakeTensorMode() as fake:
        args = (fake.from_tensor(shard), [fake.from_tensor(B) for B in Bs], dim, name)
        fake_A, fake_outs = torch.ops.weft.fused_all_gather_matmul(*args)
    for algorithm in ("fused", "unfused"):
        with forced(algorithm):
            got_A, outs = fused_all_gather_matmul(shard, Bs, dim, name)
        for out, B in zip(outs, Bs, strict=True):
            check(f"{shape} {dim} {algorithm}", out, A @ B.double(), 1e-6)
        for real, fake_one in zip([got_A, *outs], [fake_A, *fake_outs], strict=True):
            assert real.shape == fake_one.shape and real.stride() == fake_one.stride()
        if dim >= 0 and shard.numel():  # as torch's op gives them on CUDA
            front = 0 if dim == len(shape) - 1 else dim
            assert all(t.movedim(front, 0).is_contiguous() for t in [got_A, *outs])


@on_ranks(2, device=DEVICES)
def test_bad_input_is_refused_alike_by_fake_and_real(rank: int, world_size: int) -> None:
    op = torch.ops.weft.fused_all_gather_matmul
    x, B, name = torch.randn(4, 6), torch.randn(6, 5), world().group_name
    cases = [
        ((torch.randn(6), [B], 0, name), ValueError, "A_shard: has 1 dimensions"),
        ((x, [torch.randn(6)], 0, name), ValueError, r"Bs\[0\]: has 1 dimensions"),
        ((x, [B, torch.randn(7, 5)], 0, name), ValueError, r"Bs\[1\]: has 7 rows, must have 6"),
        ((x, [B], 1, name), ValueError, r"Bs\[0\]: has 6 rows, must have 12"),
        ((x, [B.half()], 0, name), TypeError, r"Bs\[0\]: is torch.float16, must be torch.float32"),
        ((x.double(), [B.double()], 0, name), TypeError, "A_shard: is torch.float64"),
        ((x, [B], 2, name), ValueError, "gather_dim: is 2, must be from -2 to 1"),
        ((x, [B], -3, name), ValueError, "gather_dim: is -3"),
        ((x, [], 0, name), ValueError, "Bs: is empty"),
        ((x, [B], 0, "nobody"), ValueError, "group: no process group is named 'nobody'"),
    ]
    for args, kind, words in cases:
        refuses(op, args, kind, words)
    out = fused_all_gather_matmul(x, [B], 0, name)[1][0]  # nothing is spoilt
    check("afterwards", out, torch.cat(gather(x)) @ B.double(), 1e-6)


@on_ranks(4, device=DEVICES)
def test_a_group_is_a_name_a_process_group_or_a_mesh_dimension(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh(torch.get_default_device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    shard, B = torch.randn(3, 4), same_on_all(4, 5, dtype=torch.float32)
    want = torch.cat([gather(shard)[2 * (rank // 2) + i] for i in range(2)]) @ B.double()
    for group in (mesh["tp"], (mesh, 1), (mesh, "tp"), mesh.get_group("tp"), mesh.get_group("tp").group_name):
        check("group", fused_all_gather_matmul(shard, [B], 0, group)[1][0], want, 1e-6)
    with pytest.raises(ValueError, match="group: the mesh has 2 dimensions"):
        fused_all_gather_matmul(shard, [B], 0, mesh)
    with pytest.raises(TypeError, match="group: must be"):
        fused_all_gather_matmul(shard, [B], 0, 3.5)
    dist.barrier()
