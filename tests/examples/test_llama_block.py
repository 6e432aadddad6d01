"""The demo runs, fuses and agrees with float64; and it fails where it must."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from ranks import run_ranks
from torchrun import run_program
from weft.fused_ops.passes.records.entry import Entry
from weft.fused_ops.passes.records.report import Report

EXAMPLES = Path(__file__).parents[2] / "examples"
DEMO = str(EXAMPLES / "llama_block.py")
SMALL = [
    "--layers",
    "1",
    "--vocabulary",
    "64",
    "--dim",
    "64",
    "--heads",
    "4",
    "--kv-heads",
    "2",
    "--hidden",
    "96",
]
SMALL += ["--seq", "32", "--updates", "4"]


ON_CPU = ["--device", "cpu", "--iterations", "2"]


def run(*args: str, timeout: float = 280) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, DEMO, *ON_CPU, *args]
    return subprocess.run(
        command,
        env=env,
        timeout=timeout,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("start", ["forked", pytest.param("started", marks=pytest.mark.slow)])
def test_two_ranks(start: str) -> None:
    """``started``: by the program itself, as users do; `make programs` runs it."""
    if start == "forked":
        done = run_program(Path(DEMO), 2, *ON_CPU, *SMALL, timeout=280)
    else:
        done = run(*SMALL)
    assert done.returncode == 0, done.stdout
    assert "median, slowest rank" not in done.stdout, "between CPU ranks times say nothing of GPUs"
    # Forward and backward, twice.
    assert "4 graphs asked the other ranks" in done.stdout, done.stdout
    count = re.search(
        r"\n(\d+) of (\d+) collectives fused: .*\nCPU ranks show .*\nOn 2 H200 .* predicted to take (\d+) us forward, "
        r"(\d+) less than unfused \(.*\)\.\nok\n$",
        done.stdout,
        re.DOTALL,
    )
    assert count and 0 < int(count[1]) <= int(count[2]), done.stdout
    assert 0 < int(count[4]) < int(count[3]), done.stdout
    assert "loss in training" in done.stdout, done.stdout
    assert "TOO FAR" not in done.stdout
    for op in ("fused_all_gather_matmul", "fused_matmul_reduce_scatter"):
        assert op in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        (["--seq", "33"], "--seq: is 33, must be a multiple of 2 ranks"),
        (["--ranks", "3"], "--kv-heads: is 4, must be a multiple of 3 ranks"),
        (["--heads", "6"], "--heads: is 6, must be a multiple of 4 kv heads"),
        (["--dim", "250"], "--dim: is 250, must be a multiple of twice 8 heads"),
        (["--updates", "1"], "--updates: is 1, must be 2 or more"),
    ],
)
def test_sizes_that_do_not_divide(
    args: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", [DEMO, "--device", "cpu", *args])
    import llama_block

    with pytest.raises(SystemExit) as error:
        llama_block.main()
    assert error.value.code == 2
    assert wanted in capsys.readouterr().err


def eager(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return fn


def off_by_a_thousandth(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A wrong loss and wrong logits wherever a pass is at work."""
    scale = 1.001 if "options" in options else 1.0
    return lambda *args: tuple(t * scale for t in fn(*args))


def off_in_training(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Wrong from the second update on, wherever a pass is at work: the first weights give what they should."""
    first: list[torch.Tensor] = []

    def run(model: Any, *args: Any) -> Any:
        weight = model.get_parameter("norm.weight").to_local().detach()
        first[:] = first or [weight.clone()]
        logits, loss = fn(model, *args)
        return logits, loss * (1.0 if torch.equal(weight, first[0]) else 1.001)

    return run if "options" in options else fn


class PassThatSays:
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self, fused_into: str | None) -> None:
        self.fused_into = fused_into

    def report(self) -> Report:
        return Report([Entry(0, "wait_tensor", "all_gather_into_tensor", "0", fused_into=self.fused_into)])


def verdict(rank: int, world_size: int, compile_: Callable[..., Any], fused_into: str | None) -> bool:
    """Of a demo that compiles nothing."""
    sys.path.insert(0, str(EXAMPLES))
    import llama_block
    import llama_model

    torch.compile = compile_
    llama_block.FusionPass = lambda: PassThatSays(fused_into)  # type: ignore[assignment,misc]
    sizes = llama_model.Sizes(
        layers=1, vocabulary=64, dim=64, heads=4, kv_heads=2, hidden=96, seq=32, batch=1, dtype="float32"
    )
    # Each rank asks for another seed, as under torchrun.
    args = argparse.Namespace(iterations=1, updates=2, seed=rank)
    return llama_block.demo(args, sizes, torch.device("cpu"))


@pytest.mark.parametrize(
    ("compile_", "fused_into", "good"),
    [
        (eager, "an op", True),
        (eager, None, False),
        (off_by_a_thousandth, "an op", False),
        (off_in_training, "an op", False),
    ],
    ids=["right", "nothing fused", "wrong loss", "wrong in training"],
)
def test_verdict(compile_: Callable[..., Any], fused_into: str | None, good: bool) -> None:
    # The ranks' torch.compile is replaced: nobody else may get them.
    assert run_ranks(verdict, 2, compile_, fused_into, fresh=True) == [good, good]
