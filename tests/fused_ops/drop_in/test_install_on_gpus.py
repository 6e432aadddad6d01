"""``weft.install()`` on CUDA: beside torch's own ops, in eager mode and in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._symmetric_memory as torch_symm
import weft
from opcommon import BOUND, check, gather, graph_of, world
from ranks import on_ranks
from weft import symm_mem

pytestmark = pytest.mark.gpu
# torch's ops would take it for small inputs.
ENV = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
ops = torch.ops.symm_mem


def counted() -> dict[tuple[str, str], int]:
    return {(t.op, t.by): t.count for t in weft.drop_in.installed_calls(clear=True)}


@pytest.mark.parametrize("rows", [32, 2048])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@on_ranks(2, device="cuda", env=ENV)
def test_like_torchs_own(rank: int, size: int, dtype: torch.dtype, rows: int) -> None:
    group = world().group_name
    torch_symm.enable_symm_mem_for_group(group)
    for shape, dim in (((rows, 512), 0), ((2, rows, 512), 0), ((2, rows, 512), 1)):
        x, w = torch.randn(shape).to(dtype), torch.randn(512, 256).to(dtype)
        results = []
        for on_weft in (False, True):
            (weft.install if on_weft else weft.drop_in.uninstall)()
            A, (y,) = ops.fused_all_gather_matmul(x, [w], dim, group)
            results.append((A, y, ops.fused_matmul_reduce_scatter(y, w.t(), "avg", dim, group)))
        want = torch.cat(gather(x), dim)
        for theirs, ours in zip(*results, strict=True):
            assert theirs.stride() == ours.stride() and theirs.dtype == ours.dtype
        check("A", results[1][0], want, 0)
        check("y", results[1][1], want @ w.double(), BOUND[dtype])
        parts = [p.chunk(size, dim)[rank] / size for p in gather(results[1][1].double() @ w.double().t())]
        check("z", results[1][2], torch.stack(parts).sum(0), BOUND[dtype], parts)
    taken = counted()
    assert all(by == "weft" for _, by in taken), taken
    weft.drop_in.uninstall()


@on_ranks(2, device="cuda", env=ENV)
def test_left_to_torch(rank: int, size: int) -> None:
    """float64, and what torch refuses: in the same call by torch's own kernels."""
    group = world().group_name
    torch_symm.enable_symm_mem_for_group(group)
    weft.install()
    x, w = torch.randn(64, 32, dtype=torch.float64), torch.randn(32, 16, dtype=torch.float64)
    A, (y,) = ops.fused_all_gather_matmul(x, [w], 0, group)
    check("y", y, torch.cat(gather(x)) @ w, 1e-13)
    check("A", A, torch.cat(gather(x)), 0)
    z = ops.fused_matmul_reduce_scatter(x, w, "sum", 0, group)
    check("z", z, torch.stack(gather(x @ w)).sum(0).chunk(size)[rank], 1e-13)
    with pytest.raises(ValueError, match="Invalid gather_dim"):
        ops.fused_all_gather_matmul(x, [w], -1, group)
    assert all(by == "torch" for _, by in counted())
    weft.drop_in.uninstall()


@on_ranks(2, device="cuda", env=ENV)
def test_in_a_cuda_graph(rank: int, size: int) -> None:
    weft.install()
    group = world().group_name
    x, w = torch.zeros(512, 1024, dtype=torch.bfloat16), torch.randn(1024, 512).bfloat16()

    def call() -> torch.Tensor:
        return ops.fused_all_gather_matmul(x, [w], 0, group, return_A=False)[1][0]  # type: ignore[no-any-return]

    call()
    graph, y = graph_of(call)
    for _ in range(3):
        x.copy_(torch.randn(512, 1024))
        graph.replay()
        check("y", y, torch.cat(gather(x)) @ w.double(), BOUND[torch.bfloat16])
    weft.drop_in.uninstall()


@on_ranks(2, device="cuda", env=ENV)
def test_all_to_all_vdev_in_a_cuda_graph(rank: int, size: int) -> None:
    """On torch's symmetric memory, without NVSHMEM: replays have other splits, and one that does not fit is named."""
    weft.install()
    group, device = world().group_name, torch.device("cuda", torch.cuda.current_device())
    torch_symm.enable_symm_mem_for_group(group)
    x, out, back = (torch_symm.empty(n, 256, dtype=torch.bfloat16, device=device) for n in (512, 768, 512))
    given = torch_symm.empty(4, dtype=torch.int64, device=device)
    found, found_back = (torch_symm.empty(2, 4, dtype=torch.int64, device=device) for _ in range(2))
    for tensor in (x, out, back, given, found, found_back):
        torch_symm.rendezvous(tensor, group)

    def call() -> None:
        ops.all_to_all_vdev_2d(x, out, given, found, group, 16)
        ops.all_to_all_vdev_2d_offset(out, back, found, found_back, group)

    given.fill_(1)
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for most in (100, 3, 0, 128):
        given.copy_(torch.randint(0, most + 1, (4,)))
        x.normal_()
        graph.replay()
        n = int(given.sum())
        assert torch.equal(back[:n], x[:n])
        assert found_back[0].tolist() == given.tolist()
        assert (
            found[0].view(2, 2).t().tolist()
            == torch.stack(gather(given))[:, 2 * rank : 2 * rank + 2].tolist()
        )
    assert {by for _, by in counted()} == {"weft"}
    symm_mem.check()
    given.copy_(torch.tensor([512, 0, 0, 0]))
    graph.replay()
    torch.cuda.synchronize()
    with pytest.raises(
        ValueError, match=r"out.shape\[0\]: is 768, must be at least 1024, the rows of the rank"
    ):
        symm_mem.check()
    assert not found[0].any() and not found_back[0].any()
    weft.drop_in.uninstall()
