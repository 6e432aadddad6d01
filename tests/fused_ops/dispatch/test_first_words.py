"""The sentence with which the first op of a group says how it runs here."""

from __future__ import annotations

import logging

import fake_gpu
import pytest
import torch
from ranks import run_ranks
from weft.fused_ops import one_shot_all_reduce
from weft.fused_ops.dispatch import plan

stage = fake_gpu.stage


def test_on_gpus(
    stage: fake_gpu.Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plan, "_logged_reasons", set())
    stage.where.fault = None
    with caplog.at_level(logging.INFO, "weft.ops"):
        for _ in range(2):
            found = plan.heap_or_reason(
                "an_op", "all_reduce", torch.device("cuda", 0), stage.group, empty=False
            )
            assert found is stage.where
    assert caplog.messages == [
        "group '0': 2 ranks on NVIDIA H100 80GB HBM3, which reach each other's memory: fused kernels"
    ]


def calls(rank: int, size: int) -> list[str]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    log = logging.getLogger("weft.ops")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    for _ in range(2):
        one_shot_all_reduce(torch.ones(3), "sum", None)
    return lines


def test_between_cpu_ranks() -> None:
    first = ["group '0': 2 CPU ranks that share memory: the GPUs' protocol, for tests only"]
    assert run_ranks(calls, 2, fresh=True) == [first, []]
