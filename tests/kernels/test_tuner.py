"""Candidates measured by several ranks, and what they then take: real ranks and files, kernels and times made up."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from weft import symm_mem
from weft.kernels.device.tuning import benchmark, tuner
from weft.kernels.device.tuning.benchmark import Candidate
from weft.kernels.device.tuning.choice import KernelChoice
from weft.kernels.device.tuning.tuned_file import TunedFile
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import get_heap
from weft.symm_mem.layout import Layout
from weft.symm_mem.workspace import HostEpoch, Workspace

CANDIDATES = [Candidate(name, Layout(2, 4 - i, 256 * (i + 1))) for i, name in enumerate("abcd")]
MODELS = KernelChoice("push", "a", Layout(2, 4, 256), profitable=True)
TIMES = ({"a": 10.0, "b": 20.0, "c": 12.0, "d": 99.0}, {"a": 30.0, "b": 22.0, "c": 25.0, "d": 1.0})


class Kernels:
    """A rank's: each tells the peers that it runs, and waits until theirs do."""

    def __init__(self, rank: int, **fails: Sequence[str]) -> None:
        self.rank, self.made, self.launched, self.fails = rank, "", "", fails

    def make(self, workspace: Workspace[Layout], config: str, timeout_ns: int) -> Callable[[], None]:
        self.made += config
        if config in self.fails.get("compile", ""):
            raise RuntimeError(f"{config} does not compile\nand a long log")

        def launch() -> None:
            self.launched += config
            if config in self.fails.get("launch", ""):
                raise RuntimeError(f"launch of {config}: refused")
            peers = [r for r in range(workspace.world_size) if r != self.rank]
            with HostEpoch(workspace, "a kernel") as use:
                for peer in peers:
                    use.wait_free(peer)
                    use.post(peer, 0)
                for peer in peers:
                    use.wait(peer, 0)

        launch.config = config  # type: ignore[attr-defined]
        return launch

    def median_us(self, launches: Sequence[Any], device: torch.device) -> list[float]:
        for launch in launches:
            launch()
        return [TIMES[self.rank][launch.config] for launch in launches]

    def tune(self, kind: str, clock: Callable[..., Any] | None = None) -> tuple[str, str]:
        """The configuration that is taken, and where it comes from."""
        with mock.patch.object(benchmark, "median_us", clock or self.median_us):
            choice, how = tuner.tuned(where(), kind, MODELS, CANDIDATES, self.make)
        assert (choice.config, choice.layout) in [(c.config, c.layout) for c in CANDIDATES]
        return choice.config, how


def where() -> Heap:
    return get_heap(dist.group.WORLD, torch.device("cpu"))


def in_folder(rank: int, folder: str) -> Any:
    """A cache of the rank's own."""
    return mock.patch.dict(os.environ, {"WEFT_CACHE_DIR": f"{folder}/{rank}"})


def agree(rank: int, world_size: int, folder: str) -> None:
    with in_folder(rank, folder):
        file, kernels = TunedFile("cpu", world_size), Kernels(rank)
        if rank == 1:
            file.add({"kind": "d"})  # of no interest: rank 0 has none
        assert kernels.tune("kind") == ("b", "tuned")
        assert kernels.made == "abcd" * 3 and kernels.launched == "abcd" * 2
        assert file.read() == {"kind": "bd"[rank]}
        assert kernels.tune("kind") == ("b", "tuned")
        assert len(kernels.made) == 12
        # The next process finds it, also while it captures a graph.
        where().tuner = None
        kernels = Kernels(rank)
        with mock.patch.object(tuner, "_is_capturing", return_value=True):
            assert kernels.tune("kind") == ("b", "tuned")
        assert not kernels.made
        # A configuration that is no candidate any more says nothing.
        file.add({"old": "z"})
        assert kernels.tune("old") == ("b", "tuned") and kernels.made


def test_ranks_take_what_is_fastest_on_the_slowest_and_keep_it(tmp_path: Path) -> None:
    run_ranks(agree, 2, str(tmp_path))


def same_object(rank: int, world_size: int, folder: str) -> None:
    """Kernels are kept under the choice: calls with other strides have another one, of the same configuration."""
    with in_folder(rank, folder), mock.patch.object(benchmark, "median_us", Kernels(rank).median_us):
        other = KernelChoice("push", "a", Layout(2, 4, 256), profitable=False)
        found = [
            tuner.tuned(where(), "same", c, CANDIDATES, Kernels(rank).make)[0]
            for c in (MODELS, MODELS, other)
        ]
    assert found[0] is found[1] is not found[2]
    assert [c.config for c in found] == ["b"] * 3 and [c.profitable for c in found] == [True, True, False]


def test_one_choice_for_each_of_the_models(tmp_path: Path) -> None:
    run_ranks(same_object, 2, str(tmp_path))


def captured(rank: int, world_size: int, folder: str) -> None:
    with (
        in_folder(rank, folder),
        mock.patch.object(tuner, "_is_capturing", return_value=True) as is_capturing,
    ):
        kernels = Kernels(rank)
        for _ in range(2):
            assert kernels.tune("captured") == ("a", "from the model")
        assert not kernels.made
        is_capturing.return_value = False
        assert kernels.tune("captured") == ("b", "tuned")
        # The eager rank may take the fast path from here on: it would not come to measure.
        kernels, is_capturing.return_value = Kernels(rank), rank == 1
        assert kernels.tune("one captures") == ("a", "from the model: some ranks capture a graph")
        is_capturing.return_value = False
        assert kernels.tune("one captures")[0] == "a" and not kernels.made


def test_nothing_is_measured_while_a_graph_is_captured(tmp_path: Path) -> None:
    run_ranks(captured, 2, str(tmp_path))


def failing(rank: int, world_size: int, folder: str) -> None:
    symm_mem.set_timeout(0.5)
    try:
        with in_folder(rank, folder):
            kernels = Kernels(rank, **([{"launch": "c"}, {"compile": "b"}][rank]))
            assert kernels.tune("some fail") == ("a", "tuned")
            assert kernels.launched == "acdad", "what did not compile on rank 1 is launched on none"

            kernels = Kernels(rank, **([{}, {"compile": "a", "launch": "bcd"}][rank]))
            config, how = kernels.tune("all fail")
            assert (config, how) == ("a", "from the model: rank 1: RuntimeError: a does not compile")
            made = kernels.made
            assert kernels.tune("all fail") == (config, how) and kernels.made == made

            def broken(*_: object) -> list[float]:
                raise RuntimeError("no time")

            kernels = Kernels(rank)
            reason = "from the model: rank 1: RuntimeError: no time"
            assert kernels.tune("no time", broken if rank == 1 else lambda *_: [1.0] * 4) == ("a", reason)
            assert TunedFile("cpu", world_size).read().keys() == ({"some fail"} if rank == 0 else set())
        symm_mem.check()
    finally:
        symm_mem.set_timeout(60)


def test_what_fails_on_one_rank_is_out_on_all_and_breaks_nothing(tmp_path: Path) -> None:
    run_ranks(failing, 2, str(tmp_path))


def left(rank: int, world_size: int, folder: str) -> str:
    """Rank 1 is interrupted while the others measure, then stays away."""

    def interrupted(*_: object) -> list[float]:
        raise KeyboardInterrupt

    said = ""
    with in_folder(rank, folder):
        assert Kernels(rank).tune("known") == ("b", "tuned")
        kernels = Kernels(rank)
        if rank == 1:
            with pytest.raises(KeyboardInterrupt):
                kernels.tune("kind", interrupted)
            with pytest.raises(symm_mem.WeftError, match=r"tune: rank 1 .* left a call half-way: Keyboard"):
                kernels.tune("kind")
        else:
            with pytest.raises(symm_mem.PeerTimeout) as error:
                kernels.tune("kind", lambda *_: [1.0] * 4)
            said = str(error.value)
        symm_mem.reset()
        assert kernels.tune("kind") == ("b", "tuned")
        symm_mem.set_timeout(0.3)
        if rank == 0:
            with pytest.raises(symm_mem.PeerTimeout, match=r"tune: rank 0 .* waited 0.3 s for rank 1"):
                kernels.tune("another")
        symm_mem.set_timeout(60)
        symm_mem.reset()
        with pytest.raises(symm_mem.RankMismatch, match="rank 1 asked for kind=kind of rank 1, rank 0 for"):
            kernels.tune(f"kind of rank {rank}")
        assert kernels.tune("known") == ("b", "tuned"), "from the file: the reset has forgotten it"
    return said


def test_a_rank_that_does_not_come_is_named(tmp_path: Path) -> None:
    said, _ = run_ranks(left, 2, str(tmp_path), fresh=True)
    assert "compare times: rank 0" in said and "it has given up" in said


def unwritable(rank: int, world_size: int, folder: str) -> None:
    with mock.patch.dict(os.environ, {"WEFT_CACHE_DIR": "/dev/null/nowhere"}):
        assert Kernels(rank).tune("not kept") == ("b", "tuned")


def test_a_cache_that_cannot_be_written_does_not_matter(tmp_path: Path) -> None:
    run_ranks(unwritable, 2, str(tmp_path))


def test_measuring_takes_turns_and_the_median(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    times = iter(ms for i in range(5) for ms in (0.3 * (i + 1), 0.6))  # the warm-ups are not asked for theirs

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self, stream: object) -> None:
            done.append("|")

        def elapsed_time(self, end: object) -> float:
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: done.append("end"))
    )
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"))
    launches = [lambda: done.append("a"), lambda: done.append("b")]
    found = benchmark.median_us(launches, torch.device("cuda", 0))
    assert found == pytest.approx([300.0, 200.0])
    assert done == [*["sleep", *"|aaa||bbb|"] * 7, "end"]
    assert next(times, None) is None
