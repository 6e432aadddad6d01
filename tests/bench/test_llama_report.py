"""The suite llama: what its rows say; a small run of it on two CPU ranks is marked slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from opcommon import world
from ranks import on_ranks
from torch._inductor import config as inductor_config

BENCH = Path(__file__).parent.parent.parent / "bench"
sys.path.insert(0, str(BENCH))

import llama_profile  # noqa: E402
import llama_rows  # noqa: E402
from llama_by_hand import shard_by_hand  # noqa: E402
from llama_steps import CPU_SIZES, Case, Llama, rotary_tables  # noqa: E402
from weft.fused_ops.passes.records.report import VoteCounts  # noqa: E402
from without_communication import WithoutCommunication  # noqa: E402

COLUMNS = "mode compile seq batch graphs weights contender ms forward_ms backward_ms tokens_per_s mfu exposed_comm_ms "
COLUMNS += "peak_bytes votes"


def row(contender: str, ms: float) -> dict[str, Any]:
    found: dict[str, Any] = dict.fromkeys(COLUMNS.split())
    return found | {
        "mode": "train",
        "compile": "whole",
        "seq": 8,
        "batch": 1,
        "contender": contender,
        "ms": ms,
        "tokens_per_s": 1000,
    }


def test_communication_that_is_covered_is_not_exposed() -> None:
    kernels = [("matmul", 0.0, 4000.0), ("communication", 1000.0, 6000.0), ("other", 3000.0, 5000.0)]
    assert llama_profile.busy(kernels) == pytest.approx(5.0)
    assert llama_profile.busy([*kernels, ("fused", 7000.0, 7500.0)]) == pytest.approx(5.5)


def test_a_layer_lies_between_two_attentions() -> None:
    names = ["nvjet_a", "x_flash_fprop_y", "nvjet_b", "ncclDevKernel_c", "x_flash_fprop_y", "nvjet_d"]
    kernels = [llama_profile.Kernel(name, 10.0 * i + 5, 10.0 * i + 12) for i, name in enumerate(names)]
    layer = [("matmul", 3.0, 10.0), ("communication", 13.0, 20.0), ("matmul", 23.0, 30.0)]
    assert llama_profile.forward_layer(kernels) == layer
    assert llama_profile.forward_layer(kernels[:4]) == []
    assert llama_profile.intervals(kernels)[0] == ("communication", 30.0, 37.0)


@pytest.mark.parametrize(
    ("kernel", "lane"),
    [
        ("ncclDevKernel_AllGather_RING_LL", "communication"),
        ("one_shot_whole", "communication"),
        ("all_gather_matmul", "fused"),
        ("nvjet_tst_128x256_64x4", "matmul"),
        ("triton_poi_fused_add_0", "other"),
    ],
)
def test_kernels_have_their_lanes(kernel: str, lane: str) -> None:
    assert llama_profile.lane_of(kernel) == lane


@on_ranks(2)
def test_weights_sharded_by_hand_give_the_same_logits(rank: int, size: int) -> None:
    """The logits of whole weights, from parts of them."""
    torch.manual_seed(3)
    model = Llama(CPU_SIZES)
    tokens = torch.randint(CPU_SIZES.vocabulary, (2, 8))
    tables = rotary_tables(replace(CPU_SIZES, seq=8), torch.device("cpu"))
    cos, sin = (t.float() for t in tables)
    with torch.no_grad():
        want = model(tokens, cos, sin)
        shard_by_hand(model, world())
        got = model(tokens, cos, sin)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert model.layers[0].feed_forward.w1.weight.shape[0] == CPU_SIZES.hidden // size


@on_ranks(2)
def test_a_graph_without_communication(rank: int, size: int) -> None:
    """A graph in which each collective does what the class says, and none is left."""
    group = world().group_name
    c10d, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor

    def exchanges(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gathered = wait(c10d.all_gather_into_tensor(x + 1, size, group))
        scattered = wait(c10d.reduce_scatter_tensor(gathered * 2, "sum", size, group))
        return gathered, scattered, wait(c10d.all_reduce(scattered, "sum", group))

    seen: list[str] = []

    class Seen(WithoutCommunication):
        def __call__(self, graph: torch.fx.Graph) -> None:
            super().__call__(graph)
            seen.extend(str(node.target) for node in graph.nodes)

    x = torch.randn(4, 6)
    compiled = torch.compile(exchanges, options={"post_grad_custom_pre_pass": Seen()})
    with inductor_config.patch(fx_graph_cache=False):
        gathered, scattered, reduced = compiled(x)
    assert not any("_c10d_functional" in target for target in seen) and len(seen) > 3
    want = torch.cat([x + 1] * size)
    torch.testing.assert_close(gathered, want)
    torch.testing.assert_close(scattered, want.chunk(size)[rank] * 2)
    torch.testing.assert_close(reduced, scattered)


def test_a_step_of_training_is_three_forwards() -> None:
    assert llama_rows.flops(Case("train", "whole", 64, 1)) == 3 * llama_rows.flops(
        Case("prefill", "whole", 64, 1)
    )
    weights = 8 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 4096 * 128256
    one = llama_rows.flops(Case("decode", "whole", 0, 1))
    assert one == 2 * weights


def test_votes_are_those_of_a_contenders_own_steps() -> None:
    series = [
        (VoteCounts(10, 10, 1.0, 3), VoteCounts(14, 14, 1.0002, 4)),
        (VoteCounts(30, 30, 5.0, 4), VoteCounts(34, 34, 5.0006, 4)),
    ]
    assert llama_rows._votes(series) == {"count": 8, "ahead": 1, "us": 100.0}
    assert llama_rows._votes([(VoteCounts(30, 30, 5.0, 4), VoteCounts(30, 30, 5.0, 4))]) is None
    assert llama_rows._votes([]) is None


def test_the_table_compares_with_plain() -> None:
    plain, ours = llama_rows.table([row("plain", 4.0), row("weft", 2.0)])
    assert "1.000 x" in plain and "2.000 x" in ours


@pytest.mark.slow
def test_a_small_run(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(BENCH / "run.py"),
        "llama",
        "--device",
        "cpu",
        "--ranks",
        "2",
        "--steps",
        "2",
    ]
    command += ["--modes", "train", "decode", "--seqs", "128", "--batches", "2", "--context", "64"]
    command += ["--contenders", "plain", "weft", "--losses", "2", "--results", str(tmp_path)]
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads((tmp_path / "cpu-x2-llama.json").read_text())
    assert [(r["mode"], r["compile"], r["contender"]) for r in content["rows"]] == [
        (mode, how, name)
        for mode, how in [("train", "whole"), ("train", "blocks"), ("decode", "whole")]
        for name in ("plain", "weft")
    ]
    assert all(set(r) == set(COLUMNS.split()) for r in content["rows"])
    plain, ours = content["losses"]["plain"], content["losses"]["weft"]
    assert ours == pytest.approx(plain, rel=1e-4)
