"""Run a function on N ranks: real processes, one a rank, gloo on the CPU or NCCL on GPUs.

    def check(rank, world_size, rows): ...
    run_ranks(check, 3, 17)

The function must be importable (a top-level function of a test file). The first failure is raised with its traceback.
"""

from __future__ import annotations

import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

TIMEOUT = 240.0  # seconds until a whole run counts as hung


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    timeout: float = TIMEOUT,
    env: dict[str, str] | None = None,
    expect_dead: tuple[int, ...] = (),
) -> list[Any]:
    """``[fn(rank, world_size, *args) for each rank]``, run at the same time in processes of one process group.

    ``device``: "cpu" over gloo, or "cuda" over NCCL, where new tensors lie on the rank's GPU by default.

    ``env`` is set before torch is imported in the ranks. Ranks in ``expect_dead`` may die without a result (None).
    """
    if device == "cuda" and torch.cuda.device_count() < world_size:
        pytest.skip(f"needs {world_size} GPUs, here are {torch.cuda.device_count()}")
    context = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="weft-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        saved = {k: os.environ.get(k) for k in env or {}}
        os.environ.update(env or {})
        for rank in range(world_size):
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_rank_main,
                args=(rank, world_size, f"file://{folder}/store", device, theirs, fn, args),
                daemon=True,
            )
            process.start()
            theirs.close()
            pipes.append(mine)
            processes.append(process)
        for k, v in saved.items():
            os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)
        try:
            return _collect(pipes, timeout, expect_dead)
        finally:
            for process in processes:
                process.join(5 if process.exitcode is None else 0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(pipes: list[Connection], timeout: float, expect_dead: tuple[int, ...]) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    failures: list[tuple[int, str]] = []
    open_pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
    deadline = time.monotonic() + timeout
    while open_pipes:
        ready = wait(list(open_pipes), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise AssertionError(
                f"ranks {sorted(open_pipes.values())} did not finish within {timeout:g} s\n{_texts(failures)}"
            )
        for pipe in ready:
            rank = open_pipes.pop(pipe)  # type: ignore[call-overload]
            try:
                ok, value = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                if rank not in expect_dead:
                    failures.append((rank, "the process died without a word"))
                continue
            if ok:
                results[rank] = value
            else:
                failures.append((rank, value))
                # The others usually fail for want of this one: give them a moment to say so, then stop.
                deadline = min(deadline, time.monotonic() + 10)
    if failures:
        raise AssertionError(_texts(failures))
    return results


def _texts(failures: list[tuple[int, str]]) -> str:
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in failures)


def _rank_main(
    rank: int,
    world_size: int,
    store: str,
    device: str,
    pipe: Connection,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
            torch.set_default_device("cuda")
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=store,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=120),
        )
        # torch.empty gives NaN: what an op leaves unwritten shows.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(rank)
        result = (True, fn(rank, world_size, *args))
    except BaseException:
        result = (False, traceback.format_exc())
    pipe.send(result)
    pipe.close()
    # A failed peer may never come to a collective shutdown: leave without one.
    os._exit(0)
