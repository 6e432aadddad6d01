"""Run a function on N ranks: real processes, one a rank: gloo on the CPU, NCCL on GPUs, staged.py on shared ones.

    def check(rank, world_size, rows): ...
    run_ranks(check, 3, 17)

    @on_ranks([2, 3])
    def test_op(rank, world_size): ...

The function must be importable (a top-level function of a test file). The first failure is raised with its traceback.
Importing torch takes seconds, so ranks stay for the next run; a run that leaves them in another state than it found
them asks for ``fresh`` ones. On the CPU ranks are forked from a server that has imported torch and compiled a graph
(compiled_before.py): one server for each environment of imports that tests ask for.

A table of shapes and dtypes is parametrized, and each of its rows is a run of its own on the same ranks:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("shape", SHAPES)
    @pytest.mark.parametrize("world_size", [2, 3])  # last: it changes least often
    def test_op(world_size, shape, dtype):
        run_row(right, world_size, shape, dtype)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import os
import pickle
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from unittest import mock

import pytest
import staged
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from compiler import collect_seldom, leave_out_measurements
from stack import with_room

TIMEOUT = 240.0  # seconds until a whole run counts as hung
AFTER_A_FAILURE = 10.0  # seconds until the other ranks count as hung
RESET_TIMEOUT = 30.0  # seconds that ranks have to reset the group after a row that failed
_KEPT = 3  # teams that wait for another run
_KEPT_SERVERS = 2  # of environments of their own
_IMPORTED = (
    "collector",
    "torch",
    "torch.distributed",
    "torch._inductor.compile_fx",
    "weft.fused_ops",
    "pytest",
)
# Variables that are read when they are asked for, not by an import: ranks need no server for them.
_READ_LATE = {
    *("WEFT_CHECK", "WEFT_TIMEOUT", "TORCHINDUCTOR_CACHE_DIR"),
    "TORCH_DISTRIBUTED_DEBUG",
    *("HF_HUB_OFFLINE", "TQDM_DISABLE", "TRANSFORMERS_VERBOSITY"),
}


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    gpus: int | None = None,
    timeout: float = TIMEOUT,
    env: dict[str, str] | None = None,
    expect_dead: tuple[int, ...] = (),
    fresh: bool = False,
    store: str = "file",
    row: bool = False,
) -> list[Any]:
    """``[fn(rank, world_size, *args) for each rank]``, run at the same time in processes of one process group.

    Args:
        device: "cpu" over gloo, or "cuda" over NCCL, where new tensors lie on the rank's GPU by default.
        gpus: on "cuda", the ranks share so many GPUs: rank r has GPU r % gpus, and the group is that of staged.py,
            as NCCL takes no two ranks on one. A kernel waits for other processes' turns on its GPU: milliseconds a
            call. Default: each has one of its own; with WEFT_TEST_SHARED_GPUS=1 they share where there are too few.
        timeout: seconds.
        env: set before torch is imported in the ranks, but for ``_READ_LATE``, which is set before their first run.
        expect_dead: ranks that may die without a result (None).
        fresh: the ranks are started for this run and end with it.
        store: "file", "tcp" (this process keeps it, as torchrun does) or "rank 0" (TCP, kept by that rank).
        row: if it fails, the ranks reset the group and stay, unless one of them hangs or is dead.
    """
    there = torch.cuda.device_count()
    if (
        device == "cuda"
        and gpus is None
        and there < world_size
        and os.environ.get("WEFT_TEST_SHARED_GPUS") == "1"
    ):
        gpus = max(1, there)
    needed = world_size if gpus is None else gpus
    if device == "cuda" and there < needed:
        pytest.skip(f"needs {needed} GPUs, here are {there}")
    if gpus is not None:
        env = {"WEFT_SHARE_GPUS": "1", **(env or {})}
    key = (world_size, device, gpus, tuple(sorted((env or {}).items())), store)
    fresh = fresh or bool(expect_dead)
    team = None if fresh else _teams.pop(key, None)
    team = team or _Team(world_size, device, gpus, env or {}, store)
    healthy = False
    try:
        try:
            results = team.run(fn, args, timeout, expect_dead)
        except AssertionError as e:
            # Of many groups that begin at once on one machine, gloo's sockets may meet another one's.
            if "connectFullMesh failed" not in str(e):
                raise
            team.stop()
            team = _Team(world_size, device, gpus, env or {}, store)
            results = team.run(fn, args, timeout, expect_dead)
        healthy = True
        return results
    except AssertionError:
        healthy = row and team.reset()
        raise
    finally:
        if healthy and not fresh:
            _teams[key] = team
            while len(_teams) > _KEPT:
                _teams.pop(next(iter(_teams))).stop()
        else:
            team.stop()


def on_ranks(
    world_size: int | Sequence[int] | None,
    device: str | Sequence[Any] | None = "cpu",
    fresh: bool = False,
    **how: Any,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A test ``test(rank, world_size, ...)``, which each of so many ranks runs; what follows the two are its arguments.

    Several world sizes or devices are a table, of which they change least often. None: a table of the test's own has
    them. ``how``: as for ``run_ranks``.
    """

    def enter(fn: Callable[..., None]) -> Callable[..., None]:
        tables = {"world_size": world_size, "device": device}
        tables = {name: values for name, values in tables.items() if not isinstance(values, int | str)}
        own = list(inspect.signature(fn).parameters.values())[2:]

        @functools.wraps(fn)
        def test(**given: Any) -> None:
            size, on = (
                given.pop(name, one) for name, one in (("world_size", world_size), ("device", device))
            )
            run_ranks(
                _tested,
                size,
                f"{fn.__module__}:{fn.__name__}",
                given,
                device=on,
                fresh=fresh,
                row=not fresh,
                **how,
            )

        names = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in tables]
        test.__signature__ = inspect.Signature([*names, *own])  # type: ignore[attr-defined]
        for name, values in tables.items():
            if values is not None:
                test = pytest.mark.parametrize(name, values)(test)
        return test

    return enter


def _tested(rank: int, world_size: int, name: str, given: dict[str, Any]) -> None:
    """By its name, at which a module has the test."""
    resolve_name(name).__wrapped__(rank, world_size, **given)


def run_row(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    device: str = "cpu",
    env: dict[str, str] | None = None,
) -> list[Any]:
    """``run_ranks`` for one row of a table: one that fails leaves the ranks to the next, reset or, if need be, new."""
    return run_ranks(fn, world_size, *args, device=device, env=env, row=True)


class _Team:
    """The processes of one process group."""

    def __init__(
        self, world_size: int, device: str, gpus: int | None, env: dict[str, str], store: str
    ) -> None:
        # A process that may use CUDA is not forked.
        context = mp.get_context("spawn" if device == "cuda" else "forkserver")
        self._folder = tempfile.TemporaryDirectory(prefix="weft-ranks-")
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._answered = True  # all ranks, to the last call
        if store == "tcp":
            self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        place = f"file://{self._folder.name}/store" if store == "file" else f"tcp://{store}"
        port = 0 if store == "file" else self._store.port if store == "tcp" else _free_port()
        late = {name: value for name, value in env.items() if name in _READ_LATE}
        early = {name: value for name, value in env.items() if name not in late}
        with _environment(early), _forked_from(early) if device == "cpu" else contextlib.nullcontext():
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                process = context.Process(
                    target=_rank_main, args=(rank, world_size, place, port, device, gpus, theirs), daemon=True
                )
                process.start()
                theirs.close()
                mine.send(late)
                self._pipes.append(mine)
                self._processes.append(process)

    def run(
        self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float, expect_dead: tuple[int, ...]
    ) -> list[Any]:
        self._answered = False
        for pipe in self._pipes:
            pipe.send((sys.path, pickle.dumps((fn, args))))
        results: list[Any] = [None] * len(self._pipes)
        failures: list[tuple[int, str]] = []
        waiting = {pipe: rank for rank, pipe in enumerate(self._pipes)}
        deadline, dead = time.monotonic() + timeout, False
        while waiting:
            ready = wait(list(waiting), max(0.0, deadline - time.monotonic()))
            if not ready:
                raise AssertionError(
                    f"ranks {sorted(waiting.values())} did not finish within {timeout:g} s\n{_texts(failures)}"
                )
            for pipe in ready:
                rank = waiting.pop(pipe)  # type: ignore[call-overload]
                try:
                    ok, value = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    dead = True
                    if rank not in expect_dead:
                        failures.append((rank, "the process died without a word"))
                    continue
                if ok:
                    results[rank] = value
                else:
                    failures.append((rank, value))
                    # The others usually fail for want of this one: give them a moment to say so, then stop.
                    deadline = min(deadline, time.monotonic() + AFTER_A_FAILURE)
        self._answered = not dead
        if failures:
            raise AssertionError(_texts(failures))
        return results

    def reset(self) -> bool:
        """After a call that failed: whether the ranks are as they were before it."""
        if not self._answered:
            return False
        try:
            self.run(_reset_state, (), RESET_TIMEOUT, ())
        except AssertionError:
            return False
        return True

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


@contextlib.contextmanager
def _environment(env: dict[str, str]) -> Iterator[None]:
    """Of processes that start meanwhile. All else stays in place, as threads start compilers."""
    saved = {k: os.environ.get(k) for k in env}
    os.environ.update(env)
    try:
        yield
    finally:
        for k, v in saved.items():
            os.environ.pop(k) if v is None else os.environ.__setitem__(k, v)


@contextlib.contextmanager
def _forked_from(env: dict[str, str]) -> Iterator[None]:
    """Processes that start meanwhile are forked from the server of this environment, which must be the present one."""
    key = tuple(sorted(env.items()))
    server = _servers.pop(key, None)
    if server is None:
        server = forkserver.ForkServer()
        server.set_forkserver_preload([*_IMPORTED, "compiled_before"])
        paths = f"{Path(__file__).parent}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        with _environment({"PYTHONPATH": paths}):
            server.ensure_running()
    _servers[key] = server
    for old in [key for key in _servers if key][:-_KEPT_SERVERS]:
        _servers.pop(old)._stop()
    with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
        yield


_teams: dict[tuple[Any, ...], _Team] = {}
_servers: dict[tuple[tuple[str, str], ...], Any] = {}


@atexit.register
def _stop_all() -> None:
    for team in _teams.values():
        team.stop()


def _texts(failures: list[tuple[int, str]]) -> str:
    return "\n".join(f"--- rank {rank}\n{text}" for rank, text in failures)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _connect(place: str, port: int, rank: int) -> dict[str, Any]:
    """How ``init_process_group`` finds the store."""
    if place.startswith("file:"):
        return {"init_method": place}
    keeps = place == "tcp://rank 0" and rank == 0
    return {"store": dist.TCPStore("127.0.0.1", port, is_master=keeps, wait_for_workers=False)}


def _reset_state(rank: int, world_size: int) -> None:
    from weft import symm_mem
    from weft.symm_mem.timeouts import default_timeout

    torch._dynamo.reset()
    symm_mem.set_checked(False)
    symm_mem.set_timeout(default_timeout())
    symm_mem.reset()
    dist.barrier()


def _rank_main(
    rank: int, world_size: int, place: str, port: int, device: str, gpus: int | None, pipe: Connection
) -> None:
    collect_seldom()
    torch.set_num_threads(1)
    leave_out_measurements()
    # torch.empty gives NaN: what an op leaves unwritten shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    os.environ |= pipe.recv()
    dist.set_debug_level_from_env()  # torch has read it when it was imported
    started = False
    while True:
        try:
            path, call = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            if not started:
                if device == "cuda":
                    torch.cuda.set_device(rank % (gpus or world_size))
                    torch.set_default_device("cuda")
                if gpus is not None:
                    staged.register()
                dist.init_process_group(
                    "gloo" if device == "cpu" else "nccl" if gpus is None else staged.NAME,
                    **_connect(place, port, rank),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=120),
                )
                started = True
            sys.path[:] = path
            fn, args = pickle.loads(call)
            torch.manual_seed(rank)
            result = (True, with_room(fn, rank, world_size, *args))
        except BaseException:
            result = (False, traceback.format_exc())
        pipe.send(result)
