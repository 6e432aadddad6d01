"""The picture of a call on all ranks."""

from __future__ import annotations

import re
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import torch
import weft
from ranks import run_ranks

LATE = 0.4  # seconds: a host may be late by a tenth on its own


def drawn(rank: int, world_size: int, file: Path) -> str:
    x, w = torch.randn(32, 24), torch.randn(24, 16)

    def call() -> None:
        if rank == 1:
            time.sleep(LATE)
        weft.fused_all_gather_matmul(x, [w], 0, None)

    with pytest.raises(ValueError, match="warm_up: is -1, must be 0 or more"):
        weft.passes.timeline(call, warm_up=-1)
    with pytest.raises(ValueError, match=r"file: is '.*call.png', must end in \.svg"):
        weft.passes.timeline(call, file.with_suffix(".png"))
    return weft.passes.timeline(call, file)


def test_each_rank_waits_copies_and_computes(tmp_path: Path) -> None:
    file = tmp_path / "call.svg"
    first, *others = run_ranks(drawn, 2, file)
    assert others == [first] and file.read_text() == first
    root = ET.fromstring(first)
    words = [e.text or "" for e in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"rank 0, host 1", "rank 1, host 1", "waits", "copies", "computes"} <= set(words), words
    spans: dict[str, list[float]] = {}
    for title in root.iter("{http://www.w3.org/2000/svg}title"):
        if found := re.fullmatch(r"(.*): ([\d.e+]+) us", title.text or ""):
            spans.setdefault(found[1], []).append(float(found[2]))
    assert first.index(">weft::fused_all_gather_matmul") < first.index(">aten::mm"), (
        "what is inside is on top"
    )
    for name in ("aten::mm", "aten::copy_", "weft::fused_all_gather_matmul"):
        assert len(spans[name]) >= 2, (name, sorted(spans))
    assert max(spans["weft:waits for rank 1"]) > LATE / 2 * 1e6, "rank 0 waits for the one that is late"
