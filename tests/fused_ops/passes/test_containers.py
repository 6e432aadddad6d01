"""Ranks that do not see each other's processes: each in a PID namespace of its own, with another hostname."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

UNSHARE = ("unshare", "--pid", "--fork", "--mount-proc", "--uts")
RUNS = 3


def fused_in_each_run(rank: int) -> list[int]:
    import torch
    from test_ranks_that_differ import gather, world
    from weft.fused_ops import FusionPass, last_plan

    x, w = torch.randn(6, 8), torch.randn(8, 5)
    fusion = FusionPass(fuse="always")
    mine = torch.compile(lambda x, w: gather(x, world()) @ w, options=fusion.options)
    seen = []
    with torch.no_grad():
        for _ in range(RUNS):
            torch.testing.assert_close(mine(x, w), gather(x, world()) @ w, rtol=1e-4, atol=1e-4)
            seen.append(fusion.report().questions.fused)
    assert last_plan().algorithm == "host"
    assert not fusion.report().disagreements, fusion.report()
    return seen


def without_the_other(rank: int, ends: int) -> tuple[list[str], float]:
    import torch
    from test_ranks_that_differ import gather, world
    from weft.fused_ops.passes import FusionPass

    x, w = torch.randn(6, 8), torch.randn(8, 5)
    fusion = FusionPass(fuse="always")
    mine = torch.compile(lambda x, w: gather(x, world()) @ w, options=fusion.options)
    with torch.no_grad():
        mine(x, w)
        if rank == ends:
            os._exit(0)
        waited = fusion.report().questions.seconds
        with pytest.raises(RuntimeError):  # the backend's, in the fallback graph
            mine(x, w)
    report = fusion.report()
    return [d.reason for d in report.disagreements], report.questions.seconds - waited


def in_containers(fn: Any, folder: Path, *args: Any) -> list[Any]:
    """``fn(rank, *args)`` on two ranks, each in a container of its own; None of a rank without a result."""
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may make no PID namespaces")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*UNSHARE, "--kill-child", sys.executable, __file__, fn.__name__, str(rank), str(folder)]
            + [str(a) for a in args],
            env=env,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=180)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [r.returncode for r in ranks] == [0, 0], "\n".join(errors)
    results = [folder / f"result {rank}" for rank in range(2)]
    return [pickle.loads(r.read_bytes()) if r.exists() else None for r in results]


@pytest.mark.timeout(240)
def test_ranks_in_containers_run_fused(tmp_path: Path) -> None:
    assert in_containers(fused_in_each_run, tmp_path) == [[1, 2, 3]] * 2


@pytest.mark.timeout(240)
@pytest.mark.parametrize("ends", [0, 1])
def test_a_rank_of_another_container_that_dies(ends: int, tmp_path: Path) -> None:
    reasons, waited = in_containers(without_the_other, tmp_path, ends)[1 - ends]
    assert reasons == [f"the process of rank {ends} has ended"]
    assert waited < 5


def main(name: str, rank: int, folder: str, *args: str) -> None:
    import torch
    import torch.distributed as dist

    socket.sethostname(f"container{rank}")
    assert os.getpid() == 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = globals()[name](rank, *map(int, args))
    Path(folder, f"result {rank}").write_bytes(pickle.dumps(result))
    time.sleep(0.1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
