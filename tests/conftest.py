"""The GPU marker, ids of shapes and dtypes, how many tests run at once, and torch's trace left unwritten."""

from __future__ import annotations

import functools
import gc
import logging
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # `from ranks import run_ranks` in every folder below
# Tests of one room use helpers and programs of another.
sys.path.extend(sorted({str(file.parent) for file in Path(__file__).with_name("fused_ops").rglob("*.py")}))
import once
from compiler import collect_seldom, leave_out_checks, leave_out_measurements
from stack import with_room

_MOST_WORKERS = 16
# The second run of `make test` reads only files that say one of these, without GPUs only those with `alone`; DEVICES of
# opcommon.py has the mark of GPUs.
_SECOND_RUN = "(alone or gpu) and not slow"
_SAYS = re.compile(r"\bmark\.(alone|gpu)\b|\bDEVICES\b")
_SAYS_ALONE = re.compile(r"\bmark\.alone\b")
# With a test of ten seconds and more. These come first: one that begins late is waited for by all other workers.
_FIRST = {
    "test_containers.py",
    "test_table.py",
    "test_fresh_processes.py",
    "test_packaging.py",
    "test_site.py",
    "test_order.py",
    "test_forks.py",
    "test_compare.py",
    "test_bench_run.py",
    "test_suites.py",
    "test_llama_block.py",
    "test_ranks_compiled.py",
    "test_soak.py",
    "test_dtensor_llama.py",
    "test_backend.py",
    "test_scaled_gemm_compile.py",
    "test_random_programs.py",
    "test_hugging_face.py",
    "test_known_on_ranks.py",
    "test_matmul_mistakes.py",
    "test_simple_fsdp.py",
    "test_hugging_face_experts.py",
    "test_nothing_new.py",
    "test_two_dimensions.py",
    "test_mixtures.py",
    "test_many_ops.py",
}

# pytest listens to every logger that does not propagate, and torch writes its trace, a tenth of a compilation, for
# whoever listens.
logging.getLogger("torch.__trace").propagate = True

leave_out_checks()
gc.disable()  # until all tests are there: of what imports make nothing is garbage


def pytest_make_parametrize_id(val: object) -> str | None:
    """``bfloat16`` and ``5x7`` instead of ``dtype1`` and ``shape0``."""
    if isinstance(val, torch.dtype):
        return str(val).removeprefix("torch.")
    if isinstance(val, tuple | list) and all(type(n) is int for n in val):
        return ("x" if isinstance(val, tuple) else "+").join(map(str, val)) or "scalar"
    return None


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """What ``-n auto`` stands for. Each worker has ranks of its own."""
    return min(len(os.sched_getaffinity(0)) + 1, _MOST_WORKERS)


@pytest.fixture(scope="session", autouse=True)
def _once(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        once.folder = request.config.cache.mkdir("once")  # type: ignore[union-attr]
        once.drop_unused()
    except (AttributeError, OSError):  # without pytest's cache, or in a checkout that cannot be written to
        own = tmp_path_factory.getbasetemp()
        once.folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "once"


@pytest.fixture
def two() -> Iterator[str]:
    """A group of two that does not communicate; its name."""
    yield from _fake_group(2)


@pytest.fixture
def three() -> Iterator[str]:
    yield from _fake_group(3)


def _fake_group(world: int) -> Iterator[str]:
    from graphs import fake_ranks

    with fake_ranks(world) as name:
        yield name


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    if "torch._dynamo" in sys.modules:  # else no test compiles in this process
        leave_out_measurements()
    gc.collect()
    collect_seldom()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    of_tests = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    if config.option.markexpr != _SECOND_RUN or not of_tests:
        return None
    says = _SAYS if torch.cuda.device_count() else _SAYS_ALONE
    return None if says.search(collection_path.read_text()) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = {item.path for item in items if any(item.iter_markers("alone")) or any(item.iter_markers("gpu"))}
    if missed := [str(file) for file in marked if not _SAYS.search(file.read_text())]:
        raise pytest.UsageError(f"the second run of `make test` would not find what these mark: {missed}")
    items.sort(key=lambda item: item.path.name not in _FIRST)
    gpus, shared = torch.cuda.device_count(), os.environ.get("WEFT_TEST_SHARED_GPUS") == "1"
    for item in items:
        item.runtest = functools.partial(with_room, item.runtest)  # type: ignore[method-assign]
        if (marker := item.get_closest_marker("gpu")) is not None:
            wanted = marker.args[0] if marker.args else 2
            if shared and not any(mark.kwargs.get("own") for mark in item.iter_markers("gpu")):
                wanted = 1
            if gpus < wanted:
                item.add_marker(
                    pytest.mark.skip(reason=f"needs {wanted} GPUs with peer access, here are {gpus}")
                )
