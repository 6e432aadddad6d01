"""A benchmark run on 2 CPU ranks: the JSON it writes, and that a wrong result gets no time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_versions import needs_row_wise_products
from torchrun import run_program

HERE = Path(__file__).parent
RUN = HERE.parent.parent / "bench" / "run.py"
NUMBER = (int, float)
SCHEMA: dict[str, Any] = {
    "name": str,
    "op": str,
    "M": int,
    "K": (int, type(None)),
    "N": int,
    "dtype": str,
    "mode": str,
    "algorithm": str,
    "weft_us": (*NUMBER, type(None)),
    "unfused_us": (*NUMBER, type(None)),
    "torch_us": (*NUMBER, type(None)),
    "limit_us": (*NUMBER, type(None)),
    "product_us": (*NUMBER, type(None)),
    "contenders_us": dict,
    "spread_us": dict,
    "host_us": dict,
    "error": (str, type(None)),
}


def written_to(results: Path) -> dict[str, Any]:
    written = [json.loads(f.read_text()) for f in sorted(results.glob("cpu-x2-*.json"))]
    return {content["rows"][0]["op"]: content for content in written}


def bench(
    results: Path, *arguments: str, program: Path = RUN
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run on 2 CPU ranks, which torchrun starts in test_compare.py; (the process, op -> what it wrote)."""
    process = run_program(program, 2, "ops", "--device=cpu", f"--results={results}", *arguments)
    return process, written_to(results)


def test_run_writes_every_op(tmp_path: Path) -> None:
    process, written = bench(
        tmp_path, "--layers=llama8b.qkv,llama8b.o", "--m-sizes=6", "--kib-sizes=2", "--plot"
    )
    assert process.returncode == 0, process.stdout + process.stderr
    assert set(written) == {
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "all_reduce",
        "all_reduce_rms_norm",
        "matmul_all_reduce",
    }
    for content in written.values():
        meta = content["meta"]
        assert list(meta) == [
            "date",
            "device",
            "world",
            "torch",
            "triton",
            "commit",
            "dirty",
            "settings",
            "command",
        ]
        assert (meta["device"], meta["world"]) == ("cpu", 2)
        assert meta["settings"]["NCCL_NVLS_ENABLE"] == "0"
        assert str(tmp_path) not in json.dumps(meta)
        assert "python -m weft bench ops --device=cpu" in meta["command"]
        (row,) = content["rows"]
        assert list(row) == list(SCHEMA)
        assert all(isinstance(row[key], kind) for key, kind in SCHEMA.items()), row
        assert row["error"] is None
        assert row["weft_us"] > 0
        assert row["unfused_us"] > 0
        assert row["torch_us"] is None
        assert row["limit_us"] is None
        assert (row["product_us"] is None) == (row["K"] is None)
        timed = row["contenders_us"] | ({"product": row["product_us"]} if row["K"] else {})
        assert set(row["spread_us"]) == set(timed)
        assert all(least <= timed[name] <= most for name, (least, most) in row["spread_us"].items())
        assert any(least < most for least, most in row["spread_us"].values())
    assert "peer/weft" in process.stdout
    for op in written:
        file = tmp_path / f"cpu-x2-{op}.svg"
        picture = file.read_text()
        assert f"wrote {file}" in process.stdout
        assert (
            ">weft<" in picture
            and ">gloo" in picture
            and "say nothing of GPUs" in picture
            and "NCCL" not in picture
        )
    assert process.stdout.count("\nllama8b.qkv ") == 1, "ranks other than 0 print nothing"


@needs_row_wise_products
def test_the_scaled_ops_on_request(tmp_path: Path) -> None:
    ops = "all_gather_scaled_matmul", "scaled_matmul_reduce_scatter"
    chosen = f"--ops={','.join(ops)}", "--layers=llama8b.qkv,llama8b.o", "--m-sizes=6"
    process, written = bench(tmp_path, *chosen)
    assert process.returncode == 0, process.stdout + process.stderr
    assert set(written) == set(ops)
    for content in written.values():
        rows = content["rows"]
        assert [row["name"].rpartition(".")[2] for row in rows] == ["tensor", "rows", "blocks"]
        for row in rows:
            assert row["error"] is None and row["weft_us"] > 0 and row["dtype"] == "bfloat16"
            # Between CPU ranks torch has no product with block-wise scales to compare with.
            assert (row["unfused_us"] is None) == row["name"].endswith(".blocks")


def test_the_layer_norm_on_request(tmp_path: Path) -> None:
    process, written = bench(tmp_path, "--ops=all_reduce_layer_norm", "--m-sizes=6")
    assert process.returncode == 0, process.stdout + process.stderr
    (row,) = written["all_reduce_layer_norm"]["rows"]
    assert row["error"] is None and row["weft_us"] > 0 and row["unfused_us"] > 0


def test_a_wrong_result_gets_no_time(tmp_path: Path) -> None:
    """Wrong on rank 1 alone, at once or later, or failed on both: weft has no time; what is right has one."""
    process, written = bench(
        tmp_path,
        "--layers=llama8b.qkv,llama8b.o",
        "--m-sizes=6",
        "--kib-sizes=2",
        program=HERE / "wrong_op.py",
    )
    assert process.returncode != 0
    ops = (
        "all_gather_matmul",
        "matmul_reduce_scatter",
        "all_reduce",
        "all_reduce_rms_norm",
        "matmul_all_reduce",
    )
    (gather,), (scatter,), (reduce,), (norm,), (worn_out,) = (written[op]["rows"] for op in ops)
    assert gather["weft_us"] is None
    assert "weft: rank 1: wrong result: error" in gather["error"]
    assert gather["unfused_us"] > 0
    assert scatter["weft_us"] is None
    assert "weft: rank 0: RuntimeError: planted failure" in scatter["error"]
    assert scatter["unfused_us"] > 0
    assert norm["weft_us"] is None
    assert "weft: rank 1: wrong result: error" in norm["error"]
    assert worn_out["weft_us"] is None
    assert "weft: after the rounds: rank 1: wrong result: error" in worn_out["error"]
    assert worn_out["unfused_us"] > 0
    assert reduce["weft_us"] > 0


def said(*arguments: str) -> tuple[int, str]:
    """Before any rank is started: the exit status and what is said."""
    command = [sys.executable, str(RUN), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.returncode, done.stdout + done.stderr


def test_an_unknown_selection_is_refused_before_ranks_start(tmp_path: Path) -> None:
    code, words = said("ops", "--device=cpu", f"--results={tmp_path}", "--layers=llama9b")
    assert code == 2 and "layers: ['llama9b'] is in none of" in words and "Traceback" not in words
    assert not list(tmp_path.iterdir())


def test_the_help_is_one_page_and_has_every_suite() -> None:
    code, words = said("--help")
    assert code == 0 and words.count("\n") < 40
    suites = {file.stem for file in (RUN.parent / "suites").glob("*.py")}
    assert set(re.findall(r"^  (\w+)  ", words, re.MULTILINE)) == suites
    code, words = said("tables")
    assert code == 2 and "SUITE: is 'tables', must be one of ops, " in words
