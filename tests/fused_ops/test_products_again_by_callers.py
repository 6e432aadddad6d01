"""The short way of a product that more than one launch makes: it gets tensors, and takes its half by itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import test_products_again as short

stage, op = short.stage, short.op


@dataclass
class Caller:
    """What is left behind where there is more to do than to launch a kernel."""

    called: list[tuple[Any, ...]] = field(default_factory=list)

    def call(self, tensors: Any, results: Any, *more: int) -> None:
        self.called.append((list(tensors), list(results), *more))


def test_a_caller_gets_tensors_and_takes_its_half_by_itself(
    stage: SimpleNamespace, op: short.Op, monkeypatch: pytest.MonkeyPatch
) -> None:
    caller = stage.launcher = Caller()
    op.first(*op.given)
    monkeypatch.setattr(stage.workspace, "next_half", lambda: pytest.fail("the caller takes it"))
    for way in (op.call, op.through_torch):
        got = short.flat(way(*op.given))
        tensors, results, *more = caller.called.pop()
        for taken, given in ((tensors, op.given), (results, got)):
            assert [x.data_ptr() for x in taken] == [x.data_ptr() for x in given]
        assert more == [300_000_000_000, 7]
    # Whether it was half-way only the caller knows.
    monkeypatch.setattr(caller, "call", lambda *_: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            op.call(*op.given)
