"""Ranks that do not see each other's processes: each in a PID namespace of its own, with another hostname."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from stack import with_room

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


def without_the_other(rank: int, ends: int) -> Any:
    import test_absent_ranks

    return test_absent_ranks.without_the_other(rank, 2, ends)


# What ranks run in their containers, one after the other, each in a process of its own.
CASES: dict[str, Callable[[int], Any]] = {
    "both": fused_in_each_run,
    "rank 0 ends": partial(without_the_other, ends=0),
    "rank 1 ends": partial(without_the_other, ends=1),
}


def in_containers(folder: Path) -> dict[str, list[Any]]:
    """What each case gives on two ranks, each in a container of its own; None of a rank without a result."""
    if subprocess.run([*UNSHARE, "true"], check=False, capture_output=True).returncode:
        pytest.skip("this user may make no PID namespaces")
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        subprocess.Popen(
            [*UNSHARE, "--kill-child", sys.executable, __file__, str(rank), str(folder)],
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
    results = {case: [folder / f"{case} on {rank}" for rank in range(2)] for case in CASES}
    return {
        case: [pickle.loads(r.read_bytes()) if r.exists() else None for r in both]
        for case, both in results.items()
    }


@pytest.mark.timeout(240)
def test_ranks_in_containers(tmp_path: Path) -> None:
    """They run fused, and notice that a rank of another container has died. One test, as containers take seconds."""
    found = in_containers(tmp_path)
    assert found["both"] == [[1, 2, 3]] * 2
    for ends in (0, 1):
        reasons, waited = found[f"rank {ends} ends"][1 - ends]
        assert reasons == [f"the process of rank {ends} has ended"]
        assert waited < 15  # half of the deadline


def run(case: str, rank: int, folder: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/{case}", rank=rank, world_size=2)
    result = CASES[case](rank)
    Path(folder, f"{case} on {rank}").write_bytes(pickle.dumps(result))
    time.sleep(0.1)


def main(rank: int, folder: str) -> None:
    socket.sethostname(f"container{rank}")
    assert os.getpid() == 1
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/{rank}"
    import collector  # noqa: F401
    import compiled_before  # noqa: F401
    import torch

    torch.set_num_threads(1)
    for case in CASES:
        # Processes of different containers have the same number.
        if os.fork() == 0:
            try:
                with_room(run, case, rank, folder)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        _, status = os.wait()
        assert status == 0, case


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
