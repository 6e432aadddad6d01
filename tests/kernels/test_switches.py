"""Environment variables of 0 or 1, each asked once in a process."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from weft.kernels.device.comm import ll_exchange


@pytest.mark.parametrize(("said", "on"), [(None, False), ("0", False), ("1", True), ("yes", None)])
@pytest.mark.parametrize(("name", "ask"), [("WEFT_PDL", ll_exchange.dependent.__wrapped__)])
def test_a_switch(
    monkeypatch: pytest.MonkeyPatch, name: str, ask: Callable[[], bool], said: str | None, on: bool | None
) -> None:
    monkeypatch.delenv(name, raising=False)
    if said is not None:
        monkeypatch.setenv(name, said)
    if on is None:
        with pytest.raises(ValueError, match=f"{name}: is 'yes', must be 0 or 1"):
            ask()
    else:
        assert ask() is on
