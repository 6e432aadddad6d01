"""The picture of a call, and of a compiled step, on all ranks."""

from __future__ import annotations

import re
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import weft
from graphs import gather
from ranks import run_ranks
from weft.fused_ops.about.timeline import calls_driver, lanes_of_threads

BAR = re.compile(r'<rect class="(\w+)" x="([^"]*)" y="0" width="([^"]*)" height="1"><title>(.*?): [\d.]+ us,')
LATE = 0.4  # seconds: a host may be late by a tenth on its own


def drawn(rank: int, world_size: int, file: Path) -> str:
    x, w = torch.randn(32, 24), torch.randn(24, 16)

    def call() -> None:
        if rank == 1:
            time.sleep(LATE)
        weft.fused_all_gather_matmul(x, [w], 0, None)

    with pytest.raises(ValueError, match="warm_up: is -1, must be 0 or more"):
        weft.passes.timeline(call, warm_up=-1)
    with pytest.raises(ValueError, match=r"file: is '.*call.png', must end in \.html"):
        weft.passes.timeline(call, file.with_suffix(".png"))
    return weft.passes.timeline(call, file)


def test_each_rank_waits_copies_and_computes(tmp_path: Path) -> None:
    file = tmp_path / "call.html"
    first, *others = run_ranks(drawn, 2, file)
    assert others == [first] and file.read_text() == first
    lanes = re.findall(r"<div class=lane>(.*?)<", first)
    assert {"rank 0, host 1", "rank 1, host 1"} <= set(lanes)
    assert [lane.split(",")[0] for lane in lanes] == sorted(lane.split(",")[0] for lane in lanes)
    assert "<script" not in first and not re.search(r"(src|href)=", first), "one file"
    for kind in ("waits", "copies", "computes"):
        assert f"</svg> {kind}<" in first
    spans: dict[str, list[float]] = {}
    for name, us in re.findall(r"<title>([^<]*): ([\d.]+) us, from [\d.]+ us<", first):
        spans.setdefault(name, []).append(float(us))
    assert first.index(">weft::fused_all_gather_matmul") < first.index(">aten::mm"), (
        "what is inside is on top"
    )
    for name in ("aten::mm", "aten::copy_", "weft::fused_all_gather_matmul"):
        assert len(spans[name]) >= 2, (name, sorted(spans))
    assert max(spans["weft:waits for rank 1"]) > LATE / 2 * 1e6, "rank 0 waits for the one that is late"


def step(rank: int, world_size: int) -> str:
    w = torch.randn(24, 16, requires_grad=True)
    x = torch.randn(32, 24, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return gather(x) @ w

    compiled = torch.compile(model, options=weft.FusionPass().options)
    return weft.passes.timeline(lambda: compiled(x).sum().backward())


def test_a_compiled_step_has_its_forward_and_its_backward() -> None:
    page, *_ = run_ranks(step, 2)
    for rank in (0, 1):
        bars = {
            lane: BAR.findall(part)
            for part in page.split("<div class=lane>")
            for lane in ("host 1", "backward")
            if part.startswith(f"rank {rank}, {lane}<")
        }
        assert {colour for colour, *_ in bars["backward"]} == {"violet"}
        ((first, last),) = (
            (float(x), float(x) + float(width))
            for _, x, width, name in bars["backward"]
            if name.endswith("CompiledFunctionBackward")
        )
        products = [
            float(x) for colour, x, _, name in bars["host 1"] if (colour, name) == ("green", "aten::mm")
        ]
        assert any(x < first for x in products) and any(first < x < last for x in products)


def reported(rank: int, world_size: int) -> tuple[str, str]:
    x, w = torch.randn(32, 24), torch.randn(24, 16)
    fusion = weft.FusionPass()
    compiled = torch.compile(lambda x: gather(x) @ w, options=fusion.options)
    compiled(x)
    with pytest.raises(TypeError, match="call: is 3, must be a function that takes nothing"):
        fusion.report().to_html(3)  # type: ignore[arg-type]
    return fusion.report().to_html(lambda: compiled(x)), fusion.report().to_html()


def test_a_report_has_the_timeline_of_a_call() -> None:
    for measured, plain in run_ranks(reported, 2):
        assert "One call on 2 ranks: " in measured and "One call" not in plain
        assert "fused_all_gather_matmul<" in plain and "fused_all_gather_matmul<" in measured
        for rank in (0, 1):
            lane = measured.split(f"<div class=lane>rank {rank}, host 1<")[1].split("<div class=lane>")[0]
            assert any(name == "aten::mm" for *_, name in BAR.findall(lane))


def test_threads_that_follow_each_other_share_a_lane() -> None:
    spans = [(7, 0.0, 9.0), (3, 1.0, 2.0), (4, 2.0, 3.0), (5, 2.5, 6.0), (7, 10.0, 12.0), (6, 11.0, 13.0)]
    assert lanes_of_threads(spans) == {7: 1, 3: 2, 4: 2, 5: 3, 6: 2}


def test_kernels_are_drawn_whatever_their_names() -> None:
    def event(device: str, name: str) -> Any:
        return SimpleNamespace(device_type=getattr(torch.autograd.DeviceType, device), name=name)

    assert calls_driver(event("CPU", "cudaLaunchKernel")) and calls_driver(event("CPU", "cuLaunchKernelEx"))
    assert not calls_driver(event("CUDA", "cutlass_80_tensorop_bf16_s16816gemm"))
    assert not calls_driver(event("CPU", "aten::mm"))
