"""A benchmark run is a pytest run on every rank: options, process group, and the report of rank 0."""

from __future__ import annotations

import os
import shlex
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

# GPUs may be shared with others: no contender uses NVLink multicast. Read when NCCL and torch start.
os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
os.environ["NCCL_NVLS_ENABLE"] = "0"

import machine
import pytest
import registry
import report
import torch
import torch.distributed as dist

RESULTS = Path(__file__).parent / "results"
START = time.perf_counter()
ROWS: list[dict[str, Any]] = []


def _words(text: str) -> tuple[str, ...]:
    return tuple(word for word in text.split(",") if word)


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("weft's benchmark; lists are separated by commas")
    group.addoption(
        "--ops",
        type=_words,
        default=registry.OPS,
        help="/".join((*registry.OPS, registry.LAYER_NORM, *registry.SCALED_OPS)),
    )
    group.addoption("--layers", type=_words, default=(), help="parts of layers' names, as in llama8b,qkv")
    group.addoption("--m-sizes", type=_numbers, default=(), help="rows of the whole left matrix")
    group.addoption("--kib-sizes", type=_numbers, default=(), help="of a collective alone: the tensor's KiB")
    group.addoption("--modes", type=_words, default=(), help="/".join(registry.MODES))
    group.addoption(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    group.addoption("--results", type=Path, default=RESULTS, help="folder for the JSON files")
    group.addoption(
        "--command", default=shlex.join(["pytest", *sys.argv[1:]]), help="how this run was started"
    )


def pytest_configure(config: pytest.Config) -> None:
    if "RANK" not in os.environ:
        raise pytest.UsageError(
            "start the ranks: torchrun --nproc-per-node N bench/run.py, or python bench/run.py"
        )
    # A rank alone at a collective is to fail soon, not after half an hour.
    patience = timedelta(seconds=180)
    if config.getoption("device") == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=patience, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=patience)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    option = metafunc.config.getoption
    try:
        rows = registry.select_rows(
            option("device"),
            option("ops"),
            option("layers"),
            option("m_sizes"),
            option("kib_sizes"),
            option("modes"),
        )
    except ValueError as e:
        raise pytest.UsageError(str(e)) from e
    metafunc.parametrize("row", rows, ids=[row.id for row in rows])


@pytest.fixture
def device(request: pytest.FixtureRequest) -> torch.device:
    return (
        torch.device("cpu")
        if request.config.getoption("device") == "cpu"
        else torch.device("cuda", torch.cuda.current_device())
    )


@pytest.fixture
def results() -> list[dict[str, Any]]:
    return ROWS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if dist.get_rank() != 0 or not ROWS:
        return
    command, folder = config.getoption("command"), config.getoption("results")
    meta = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        **machine.described(config.getoption("device"), dist.get_world_size()),
        "command": command.replace(str(folder), folder.name) if folder.is_absolute() else command,
    }
    terminalreporter.section("microseconds a call")
    for line in report.result_table(ROWS):
        terminalreporter.write_line(line)
    for path in report.write(ROWS, meta, folder):
        terminalreporter.write_line(f"wrote {path}")
    terminalreporter.write_line(f"{len(ROWS)} rows in {time.perf_counter() - START:.0f} s")


def pytest_unconfigure() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
