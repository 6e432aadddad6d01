"""Dumps of the flight recorder: weft's calls among those of NCCL and gloo, for torch's analyzer (``torchfrtrace``).

A rank dumps when a group breaks on it. It says so in the default store, at which a thread of every rank looks once a
second: so a rank that is late dumps what it has done by then, also if it never comes.
"""

from __future__ import annotations

import atexit
import logging
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.distributed import distributed_c10d

from .. import flight_recorder
from ..bootstrap.store import restart_count
from ..call_site import text
from ..flight_recorder import KnownGroup, RecordedCall
from ..timeouts import chosen_timeout, default_timeout

_log = logging.getLogger("weft.symm_mem")
_LEFT_OUT = "left out"
_LOOKS = 1.0  # seconds between two looks at the store


def flight_record(file: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """The last calls of this rank: weft's, and what torch's flight recorder has of NCCL and gloo, in their order.

    >>> import torch
    >>> from weft import symm_mem
    >>> from weft.fused_ops import one_shot_all_reduce
    >>> y = one_shot_all_reduce(torch.ones(4), "sum", None)
    >>> record = symm_mem.flight_record()
    >>> calls = record["entries"]  # those of weft if TORCH_FR_BUFFER_SIZE is set to more than 0

    weft records its calls where ``TORCH_FR_BUFFER_SIZE`` is set; it is the number that is kept, as of torch's. With
    ``TORCH_FR_DUMP_TEMP_FILE`` set, too, every rank writes its record to that prefix and ``weft_<rank>`` when a group
    breaks on one of them. ``torchfrtrace <folder>`` compares the files of all ranks, and names who did not come.

    Args:
        file: where it is written to, as torch's analyzer reads it: pickled. The name must end with the rank.

    Returns:
        what torch's ``_dump_fr_trace`` gives, unpickled. Each entry has the group's name and description, sizes,
        dtypes, state ("started" and "completed" between CPU ranks; "scheduled" on CUDA), times and the calling line.
        ``profiling_name`` is the collective that torch's analyzer takes the call for; ``frames`` names weft's op.

    Raises:
        OSError: the file cannot be written.
    """
    record = _record(stacks=True)
    if file is not None:
        _write(record, Path(file))
    return record


def _write(record: dict[str, Any], file: Path) -> None:
    # Whoever finds the file finds all of it, also where this process ends meanwhile.
    begun = file.with_name(f".{file.name}.{os.getpid()}")
    begun.write_bytes(pickle.dumps(record))
    begun.replace(file)


def _record(leave_out: RecordedCall | None = None, *, stacks: bool) -> dict[str, Any]:
    """``stacks``: where torch's calls came from, for which it looks up C++ lines, too: seconds, the first time."""
    known = _known_groups()
    record: dict[str, Any] = {"version": "2.10"}
    kept = list(flight_recorder.calls or ())
    calls = [call if isinstance(call, RecordedCall) else RecordedCall(*call) for call in kept]
    entries = [_entry(call, known[call.group], call is leave_out) for call in calls if call.group in known]
    count, begins = sum(flight_recorder.counts.values()), 0
    # Older ones are gone, and with them those of the others at that time. A call is counted before it is kept.
    if calls and len(kept) < count:
        begins = calls[0].created
    for name in ("_dump_nccl_trace", "_dump_fr_trace"):
        if (dump := getattr(_distributed_c10d, name, None)) is not None:
            found = pickle.loads(dump(True, stacks, False))
            if theirs := found.pop("entries", []):
                entries += theirs
                count += theirs[-1]["record_id"] + 1
                if theirs[0]["record_id"]:
                    begins = max(begins, theirs[0]["time_created_ns"])
            record |= found
    entries.sort(key=lambda entry: entry["time_created_ns"])
    for i, entry in enumerate(entries, count - len(entries)):
        entry["record_id"] = i
    entries = [
        entry
        for entry in entries
        # One of a group that is gone would be an error to the analyzer.
        if entry["process_group"][0] in known
        and entry["time_created_ns"] >= begins
        and not entry.get(_LEFT_OUT)
    ]
    _number(entries)
    config = {
        name: {"name": name, "desc": group.desc, "ranks": str(group.ranks)} for name, group in known.items()
    }
    return record | {"pg_config": config, "entries": entries}


def _known_groups() -> dict[str, KnownGroup]:
    """Groups that weft has seen, and all that torch knows."""
    known = dict(flight_recorder.groups)
    for group, name in list(distributed_c10d._world.pg_names.items()):
        if isinstance(group, dist.ProcessGroup):
            known[str(name)] = KnownGroup(group.group_desc, dist.get_process_group_ranks(group))
    return known


def _entry(call: RecordedCall, group: KnownGroup, left_out: bool) -> dict[str, Any]:
    shape = call.shape
    taken, given = flight_recorder.sizes_of(shape, len(group.ranks))
    dtype = flight_recorder.dtype_name(shape.dtype)
    file, _, line = (text(call.site) or "?:0").rpartition(":")
    on_cpu = shape.device == "cpu"
    return {
        "frames": [{"name": call.op, "filename": file, "line": int(line)}],
        "pg_id": list(flight_recorder.counts).index(call.group),
        "process_group": (call.group, group.desc),
        "collective_seq_id": call.sequence,
        "p2p_seq_id": 0,
        "op_id": call.sequence,
        "profiling_name": f"{'gloo' if on_cpu else 'nccl'}:{shape.kind}",
        "time_created_ns": call.created,
        "input_sizes": [taken],
        "input_dtypes": [dtype],
        "output_sizes": [given],
        "output_dtypes": [dtype],
        "state": "completed" if call.ended else "started" if call.started else "scheduled",
        "time_discovered_started_ns": call.started or None,
        "time_discovered_completed_ns": call.ended or None,
        "retired": bool(call.ended),
        "timeout_ms": int((chosen_timeout(call.group) or default_timeout()) * 1000),
        "is_p2p": False,
        "is_weft": True,
        _LEFT_OUT: left_out,
    }


def _number(entries: list[dict[str, Any]]) -> None:
    """One sequence of a group's collectives, whose ever they are: what each side has numbered, and what the other one
    had by then."""
    last: dict[tuple[str, bool], int] = {}
    for entry in reversed(entries):  # what a side had before the first one that is kept
        if not entry["is_p2p"]:
            last[entry["process_group"][0], "is_weft" in entry] = entry["collective_seq_id"] - 1
    for entry in entries:
        if not entry["is_p2p"]:
            name, is_weft = entry["process_group"][0], entry.pop("is_weft", False)
            entry.pop(_LEFT_OUT, None)
            last[name, is_weft] = entry["collective_seq_id"]
            entry["collective_seq_id"] += last.get((name, not is_weft), 0)


class _Dumper:
    """Dumps once, when a group breaks on this rank or on another one."""

    def __init__(self) -> None:
        self._done, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    def watches(self) -> None:
        """With the first call: the ranks are there."""
        if self._thread is None and _prefix():
            atexit.register(self._ends)
            self._thread = threading.Thread(target=self._watch, name="weft flight recorder", daemon=True)
            self._thread.start()

    def _ends(self) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join(2 * _LOOKS)

    def _watch(self) -> None:
        with suppress(Exception):  # the store is gone, and with it the run
            store: Any = distributed_c10d._get_default_store()
            store = store.clone()  # for this thread
            while not self._done.wait(_LOOKS):
                if store.check([_failed()]):
                    self._dump()

    def failed(self, error: BaseException) -> None:
        """A group is broken on this rank."""
        # Whoever is told that the others have given it up begins its call only now: it had not come.
        rank, culprit = getattr(error, "rank", None), getattr(error, "culprit", None)
        is_late = rank == culprit and getattr(error, "blames", None) is not None
        if not _prefix():
            return
        with suppress(Exception):
            distributed_c10d._get_default_store().set(_failed(), "1")
        self._dump(flight_recorder.this_thread.call if is_late else None)

    def _dump(self, leave_out: RecordedCall | None = None) -> None:
        with self._lock:
            if self._done.is_set():
                return
            self._done.set()
            file = f"{_prefix()}weft_{dist.get_rank()}"
            try:
                _write(_record(leave_out, stacks=False), Path(file))
            except Exception as e:  # not in place of what has broken the group
                _log.warning("the flight record cannot be written to %s: %r", file, e)
            else:
                _log.warning("the flight record of this rank is in %s", file)


def _failed() -> str:
    """The key that a rank sets whose group is broken."""
    return f"weft/a group is broken/{restart_count()}"


def _prefix() -> str | None:
    return os.environ.get("TORCH_FR_DUMP_TEMP_FILE") or os.environ.get("TORCH_NCCL_DEBUG_INFO_TEMP_FILE")


if flight_recorder.calls is not None:
    _dumper = _Dumper()
    flight_recorder.at_first_call, flight_recorder.at_failure = _dumper.watches, _dumper.failed
