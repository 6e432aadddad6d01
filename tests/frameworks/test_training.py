"""examples/train_qwen3.py by torchrun: weft's losses are plain's, through a killed rank and other numbers of ranks."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.distributed")

PROGRAM = Path(__file__).parents[2] / "examples" / "train_qwen3.py"
STEPS, SAVE_EVERY, KILL_AFTER = 32, 8, 11
# Of float32, in up to 32 updates by AdamW, whose first ones are of the rate's size however small a gradient is.
BOUND = 1e-5
SETTLED = 4  # from this step of a run on its memory stays
NOISE = 4 << 20  # bytes that Python's own objects may take


def rows(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank has logged, without a line that is not whole yet."""
    file = folder / f"rank{rank}.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kill_late(folder: Path) -> bool:
    """Kills rank 1 once it has made the step after which it is to die; whether it was killed."""
    last = (rows(folder, 1) or [{"step": -1}])[-1]
    if last["step"] < KILL_AFTER:
        return False
    os.kill(last["pid"], signal.SIGKILL)
    return True


def torchrun(folder: Path, ranks: int, *arguments: str, until: Callable[[], bool] = lambda: True) -> None:
    """``until`` is asked again and again, up to its first yes."""
    cache = folder.parent / "inductor"  # a rank that is killed may leave half a library in it
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # or gloo finds addresses of ranks that have died
    env |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    command += [f"--nproc-per-node={ranks}", str(PROGRAM), str(folder), f"--save-every={SAVE_EVERY}"]
    out = folder.with_suffix(".txt")
    with out.open("a") as file:
        run = subprocess.Popen([*command, *arguments], env=env, stdout=file, stderr=subprocess.STDOUT)
        try:
            while run.poll() is None and not until():
                time.sleep(0.05)
            assert run.wait(500) == 0, out.read_text()
        finally:
            run.terminate()  # torchrun ends its ranks, too
            run.wait()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", ["tiny", "tiny mixture"])
def test_a_curve_of_losses(size: str, tmp_path: Path) -> None:
    """Two ranks, one of which is killed; then four, then one, each from the newest checkpoint."""
    plain, ours = tmp_path / "plain", tmp_path / "weft"
    torchrun(plain, 2, "--contender=plain", f"--size={size}", f"--steps={STEPS}")
    given = ("--contender=weft", f"--size={size}")
    torchrun(ours, 2, *given, "--steps=16", until=lambda: kill_late(ours))
    torchrun(ours, 4, *given, "--steps=24")
    torchrun(ours, 1, *given, f"--steps={STEPS}")

    want = [row["loss"] for row in rows(plain, 0)]
    assert len(want) == STEPS and want[-1] < want[0] - 0.5
    found = rows(ours, 0)
    # Those from 8 on were made, lost with the killed rank, and made again from the checkpoint.
    assert {row["step"] for row in found if row["restarts"]} == set(range(SAVE_EVERY, 16))
    assert {row["step"] for row in found} == set(range(STEPS)) and len(found) > STEPS
    assert [row["world"] for row in found if row["step"] in (15, 23, 31)] == [2, 4, 1]
    for row in found:
        assert row["loss"] == pytest.approx(want[row["step"]], rel=BOUND), row
    for rank in range(4):
        for row in rows(ours, rank):
            assert row["loss"] == pytest.approx(want[row["step"]], rel=BOUND), (rank, row)

    for _, run in groupby(found, lambda row: row["pid"]):
        first, *_, last = list(run)[SETTLED:]
        assert last["rss"] - first["rss"] < NOISE, (first, last)
        assert last["heap"] == first["heap"] and (last["heap"] > 0) == (last["world"] > 1), (first, last)
