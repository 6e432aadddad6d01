"""What is said of what takes its time: to logging, or to a person at a terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
from unittest import mock

import pytest
import torch.distributed as dist
from ranks import on_ranks
from weft import symm_mem
from weft.symm_mem import errors

LOG = logging.getLogger("weft.ops")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def said(stderr: io.StringIO, *, speaks: bool | None = None) -> str:
    with mock.patch.object(sys, "stderr", stderr):
        errors.tell_progress(LOG, "compiles 100% of it", speaks=speaks)
    return stderr.getvalue()


def test_a_terminal_is_told_where_logging_is_not_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest has its own
    assert said(Terminal()) == "weft: compiles 100% of it\n"
    assert not said(Terminal(), speaks=False), "one rank speaks"
    assert not said(io.StringIO()), "a file is no terminal"
    monkeypatch.setattr(logging.getLogger("weft"), "level", logging.WARNING)
    assert not said(Terminal()), "the program has chosen a level"


def test_logging_that_is_set_up_is_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, "weft.ops"):
        assert not said(Terminal()) and not said(Terminal(), speaks=False)
    assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
        ("INFO", "compiles 100% of it"),
        ("DEBUG", "compiles 100% of it"),
    ]


@on_ranks(2, fresh=True)
def test_a_rank_that_is_late_is_named_twice(rank: int, world_size: int) -> None:
    """As progress, then as a warning, in both kinds of steps through the store; each once."""
    lines: list[tuple[str, str]] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append((record.levelname, record.getMessage()))  # type: ignore[method-assign]
    log = logging.getLogger("weft.symm_mem")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for step in ("make a heap", "allocate"):
        symm_mem.set_timeout(0.8)
        if rank == 0:
            with (
                mock.patch.multiple(errors, PATIENT=0.1, SILENT=0.4),
                pytest.raises(symm_mem.PeerTimeout, match=step),
            ):
                symm_mem.empty(4)
            assert [level for level, _ in lines] == ["INFO", "WARNING"], lines
            for _, line in lines:
                assert re.match(rf"{step}.*: rank 0 of group '0' has waited 0 s for rank 1, since ", line), (
                    line
                )
            lines.clear()
            errors._warned.clear()
        dist.barrier()
        symm_mem.set_timeout(20)
        symm_mem.reset()
        symm_mem.empty(4)
    assert not lines, "who is in time is not named"
