"""The flight recorder: which calls are kept, in which order, and whom torch's own analyzer names from the dumps."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import weft
from ranks import run_ranks
from torch_versions import ANALYZED_GLOO
from weft import symm_mem
from weft.fused_ops.dispatch.plan import forced
from weft.kernels.device.collective.host_exchange import CHUNK_BYTES
from weft.symm_mem import flight_recorder

KEPT = 24
ENV = {"TORCH_FR_BUFFER_SIZE": str(KEPT)}


def weft_group(seconds: float = 60) -> Any:
    group = dist.new_group(backend="weft", group_desc="of the test")
    symm_mem.set_timeout(seconds, group)
    return group


def mixed_calls(group: Any) -> None:
    """Six, two of them gloo's."""
    x, w, size = torch.ones(2, 4), torch.ones(4, 3), group.size()
    dist.all_reduce(x, group=group)
    dist.broadcast(x, group_src=0, group=group)
    weft.fused_all_gather_matmul(x, [w, w], 0, group)
    work = dist.all_gather_into_tensor(
        torch.empty(2 * size, 4).bfloat16(), x.bfloat16(), group, async_op=True
    )
    work.wait()
    with forced("unfused"):
        weft.one_shot_all_reduce(x, "sum", group)
    weft.fused_matmul_reduce_scatter(torch.ones(2 * size, 4), w, "sum", 0, group)


def of(group: Any) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = symm_mem.flight_record()["entries"]
    return [e for e in entries if e["process_group"] == (group.group_name, "of the test")]


def in_order(rank: int, world_size: int) -> None:
    group, before = weft_group(), time.time_ns()
    mixed_calls(group)
    entries = of(group)
    names = [entry["profiling_name"].partition(":")[2] for entry in entries]
    # What runs unfused is gloo's, and there once.
    assert names == [
        "all_reduce", "broadcast", "_all_gather_base", "_all_gather_base", "all_reduce", "_reduce_scatter_base"
    ]  # fmt: skip
    assert [entry["collective_seq_id"] for entry in entries] == [1, 2, 3, 4, 5, 6]
    ours = [entry for i, entry in enumerate(entries) if i not in (1, 4)]
    assert [entry["frames"][0]["name"] for entry in ours] == [
        "all_reduce", "fused_all_gather_matmul", "all_gather_into_tensor", "fused_matmul_reduce_scatter"
    ]  # fmt: skip
    assert all(entry["frames"][0]["filename"] == __file__ for entry in ours)
    W = world_size
    assert [(entry["input_sizes"][0], entry["output_sizes"][0]) for entry in ours] == [
        ([8], [8]), ([2, 4], [W, 2, 4]), ([8], [W, 8]), ([2 * W, 3], [6])
    ]  # fmt: skip
    assert [entry["input_dtypes"] for entry in ours] == [["Float"], ["Float"], ["BFloat16"], ["Float"]]
    for entry in ours:
        assert entry["state"] == "completed" and entry["retired"]
        times = [
            entry[f"time_{what}_ns"] for what in ("created", "discovered_started", "discovered_completed")
        ]
        assert before < times[0] <= times[1] <= times[2] < time.time_ns()
    with pytest.raises(symm_mem.RankMismatch):
        dist.reduce_scatter_tensor(torch.empty(3 + rank), torch.empty(W * (3 + rank)), group=group)
    assert of(group)[-1]["state"] == "started", "a call that has not come to its end"


def test_calls_are_among_those_of_gloo() -> None:
    run_ranks(in_order, 2, env=ENV, fresh=True)


def analyzed(folder: Path) -> str:
    """What torch's analyzer says of the dumps there."""
    if not ANALYZED_GLOO:
        pytest.skip("the analyzer of this torch reads calls of NCCL only")
    from torch.distributed.flight_recorder import fr_trace

    said, logger = io.StringIO(), logging.getLogger("Flight Recorder")
    handler = logging.StreamHandler(said)
    logger.addHandler(handler)
    try:
        with contextlib.redirect_stdout(said):
            fr_trace.main([str(folder)])
    finally:
        logger.removeHandler(handler)
    return said.getvalue()


def more_than_are_kept(rank: int, world_size: int, folder: Path) -> None:
    group = weft_group()
    for _ in range(KEPT):
        mixed_calls(group)
    record = symm_mem.flight_record(folder / f"rank_{rank}")
    ours = [e for e in record["entries"] if e["frames"][0]["filename"] == __file__]
    assert len(ours) == KEPT and record["entries"][-1]["collective_seq_id"] == 6 * KEPT
    with (folder / f"rank_{rank}").open("rb") as file:
        assert pickle.load(file)["pg_config"][group.group_name]["ranks"] == "[0, 1]"


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "rank_0").write_bytes(b"of before")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", lambda *_: None)  # the process ends before
        symm_mem.flight_record(file)
    assert file.read_bytes() == b"of before"
    symm_mem.flight_record(file)
    assert pickle.loads(file.read_bytes())["version"]


def test_a_record_while_the_first_call_is_counted_and_not_yet_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flight_recorder.calls is None
    monkeypatch.setattr(flight_recorder, "counts", {"0": 1})
    assert symm_mem.flight_record()["entries"] == []


def test_the_last_calls_are_kept(tmp_path: Path) -> None:
    run_ranks(more_than_are_kept, 2, tmp_path, env=ENV, fresh=True)
    said = analyzed(tmp_path)
    assert "Not all ranks" not in said and "errors" not in said.replace("No errors", ""), said


def fails(rank: int, world_size: int, folder: Path, what: str) -> None:
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    late, file = world_size - 1, folder / f"rank_weft_{rank}"
    group = weft_group()
    mixed_calls(group)
    dist.barrier()
    symm_mem.set_timeout(0.5, group)
    if rank == late and what != "skips a call":
        end = time.monotonic() + 30
        while not file.exists() and time.monotonic() < end:  # another thread writes it
            time.sleep(0.01)
        if what == "never comes":
            return
    if rank != late or what == "comes late":
        with pytest.raises(symm_mem.PeerTimeout):
            # In several chunks: of a late rank the first one finds what it waits for.
            dist.all_reduce(torch.ones(3 * CHUNK_BYTES // 4), group=group)
    else:
        with pytest.raises(symm_mem.PeerTimeout):
            weft.fused_all_gather_matmul(torch.ones(2, 4), [torch.ones(4, 3)], 0, group)


@pytest.mark.parametrize("what", ["never comes", "comes late", "skips a call"])
def test_torchs_analyzer_names_the_rank(tmp_path: Path, what: str) -> None:
    run_ranks(fails, 3, tmp_path, what, env=ENV, fresh=True)
    said = analyzed(tmp_path)
    assert "sequence number: 7" in said and "of the test" in said, said
    if what == "skips a call":
        assert "COLLECTIVE_TYPE_MISMATCH" in said, said
    else:
        assert "missing ranks: {2}" in said and f"all_reduce at {__file__}" in said, said


def told_late(rank: int, world_size: int, folder: Path, asynchronous: bool) -> None:
    """A rank that hears of it only by its own call: that one had not come when the others gave up."""
    os.environ["TORCH_FR_DUMP_TEMP_FILE"] = f"{folder}/rank_"
    group = weft_group()
    dist.all_reduce(torch.ones(3 * CHUNK_BYTES // 4), group=group)
    dist.barrier()
    symm_mem.set_timeout(0.3, group)
    if rank == 1:
        time.sleep(1.0)
    options = dist.AllreduceOptions()
    options.asyncOp = asynchronous
    with pytest.raises(symm_mem.PeerTimeout):
        # In several chunks: the first one is there, of the second the others have given up.
        group.allreduce([torch.ones(3 * CHUNK_BYTES // 4)], options).wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_is_told_by_its_own_call(tmp_path: Path, asynchronous: bool) -> None:
    run_ranks(told_late, 2, tmp_path, asynchronous, env=ENV, fresh=True)
    assert "missing ranks: {1}" in analyzed(tmp_path)


def off(rank: int, world_size: int) -> None:
    group = weft_group()
    mixed_calls(group)
    assert flight_recorder.calls is None
    assert not [e for e in of(group) if e["frames"][0]["filename"] == __file__]


def test_it_is_off_unless_asked_for() -> None:
    run_ranks(off, 2)
