"""The two kernels of acquire.cu on the CPU, each by itself: what it waits for, what it counts, and whom it blames."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import fibers
import pytest
import torch
from fibers import Launch, Library, Place
from test_late_copies import ABORTED, KERNELS, compiled
from weft.kernels.device.comm import acquire
from weft.symm_mem.failure.fault import Fault
from weft.symm_mem.layout import Layout

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

SIZE, RANK, BUFFER, EPOCHS = 4, 1, 1, 7  # EPOCHS of BUFFER are over on rank RANK, on which the kernels run
PEERS = [peer for peer in range(SIZE) if peer != RANK]
LAYOUT = Layout(SIZE, 1, 64)
WAIT_FREE = 2  # kind of a record


class Ranks:
    """Control words of each rank, and after them those of a fault; the one of RANK has a record."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, library: Library) -> None:
        self.library = library
        self.memory = torch.zeros(SIZE, LAYOUT.bytes // 4 + Fault.WORDS, dtype=torch.int32)
        self.words, self.faults = self.memory[:, : LAYOUT.bytes // 4], self.memory[:, LAYOUT.bytes // 4 :]
        self.record = torch.zeros(8, dtype=torch.int64)
        fault = fibers.Fault(self.faults[RANK].data_ptr(), self.record.data_ptr())
        address, span = self.memory[RANK].data_ptr(), 4 * self.memory.stride(0)
        self.place: Any = Place(LAYOUT, address, span, RANK, fault)
        self.done = self.words[:, LAYOUT.done(BUFFER) : LAYOUT.done(BUFFER) + SIZE]
        self.words[RANK, LAYOUT.EPOCH + BUFFER] = self.words[RANK, LAYOUT.EPOCH_TICKET + BUFFER] = EPOCHS
        self.done[RANK] = EPOCHS
        monkeypatch.setattr(acquire, "PROGRAM", SimpleNamespace(function=self._function))

    def _function(self, name: str) -> SimpleNamespace:
        def launch(blocks: int, threads: int, params: ctypes.Structure, _: int) -> None:
            note = Launch(KERNELS.index(name), blocks, threads)
            ctypes.memmove(ctypes.addressof(note) + 16, ctypes.addressof(params), ctypes.sizeof(params))
            self.library.library.run_one(ctypes.byref(note), RANK)

        def bound(blocks: int, threads: int, params: ctypes.Structure) -> Callable[[int], None]:
            return lambda stream: launch(blocks, threads, params, stream)

        return SimpleNamespace(launch=launch, bound=bound)

    @property
    def abort_notices(self) -> list[list[int]]:
        """What each rank has been told, by whom."""
        return self.faults[:, Fault.ABORT_NOTICE : Fault.ABORT_NOTICE + SIZE].tolist()

    def opened(self) -> bool:
        """Whether the acquire kernel counts an epoch; else it only posts an abort notice."""
        before = self.memory.clone()
        acquire.StreamWait("acquire", self.place, BUFFER).launch(50, 0)
        before[:, LAYOUT.bytes // 4 :] = self.faults
        ticket = self.words[RANK, LAYOUT.EPOCH_TICKET + BUFFER].item()
        before[RANK, LAYOUT.EPOCH_TICKET + BUFFER] = ticket
        assert torch.equal(before, self.memory) and ticket in (EPOCHS, EPOCHS + 1)
        return ticket != EPOCHS


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compiled(tmp_path_factory.mktemp("acquire"))


def told(blamed: int) -> list[list[int]]:
    return [[1 + blamed if by == RANK and rank != RANK else 0 for by in range(SIZE)] for rank in range(SIZE)]


def test_the_gate_opens_when_every_peer_has_left(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, library)
    ranks.done[RANK, RANK] = 0  # nobody waits for itself
    ranks.done[RANK, 2] = EPOCHS + 1  # a peer may be ahead
    assert ranks.opened()
    assert not ranks.faults.any() and not ranks.record.any()


@pytest.mark.parametrize("late", PEERS)
def test_the_gate_stays_shut_for_one_that_has_not(
    library: Library, monkeypatch: pytest.MonkeyPatch, late: int
) -> None:
    ranks = Ranks(monkeypatch, library)
    ranks.done[RANK, late] = EPOCHS - 1
    assert not ranks.opened()
    assert ranks.abort_notices == told(late)
    assert ranks.faults[RANK, Fault.BROKEN] == 1 + late
    word = LAYOUT.done(BUFFER) + late
    assert ranks.record[:7].tolist() == [1, ranks.place.address, late, word, EPOCHS, EPOCHS - 1, WAIT_FREE]


@pytest.mark.parametrize("blamed", range(SIZE))
def test_the_gate_of_a_broken_group_stays_shut(
    library: Library, monkeypatch: pytest.MonkeyPatch, blamed: int
) -> None:
    ranks = Ranks(monkeypatch, library)
    ranks.faults[RANK, Fault.BROKEN] = 1 + blamed
    assert not ranks.opened()
    assert ranks.abort_notices == told(blamed) and not ranks.record.any()


@pytest.mark.parametrize("gone", [None, *PEERS])
def test_the_end_of_a_use(library: Library, monkeypatch: pytest.MonkeyPatch, gone: int | None) -> None:
    ranks, blamed = Ranks(monkeypatch, library), 3
    if gone is not None:
        ranks.faults[RANK, Fault.ABORT_NOTICE + gone] = 1 + blamed
    want, faults = ranks.words.clone(), ranks.faults.clone()
    want[:, LAYOUT.done(BUFFER) + RANK] = want[RANK, LAYOUT.EPOCH + BUFFER] = EPOCHS + 1
    acquire.end_epoch_launcher(ranks.place, BUFFER)(0)
    assert torch.equal(ranks.words, want)
    if gone is None:
        assert torch.equal(ranks.faults, faults) and not ranks.record.any()
        return
    faults[RANK, Fault.BROKEN] = 1 + blamed
    assert torch.equal(ranks.faults, faults)
    word = LAYOUT.done(BUFFER) + gone
    assert ranks.record[:7].tolist() == [1, ranks.place.address, gone, word, EPOCHS + 1, 1 + blamed, ABORTED]
