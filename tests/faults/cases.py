"""One op, one fault, all ranks: what each rank sees, how long it takes, and whether the group comes back."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults.forked import fields, in_child, refusal
from faults.inject import Fault
from faults.ops import OPS, Case
from weft import symm_mem
from weft.fused_ops.dispatch.plan import forced

STEPS = 5
STRIKES_AT = 2
VOTE_DEADLINE = 30.0  # seconds: the deadline of everything that is expected to work
CHECKED = ("skip", "corrupt")  # without the checked mode ranks that differ may agree on wrong numbers


@dataclass
class Seen:
    """What one rank saw.

    ``error``: class, text and attributes of what its call raised, ``seconds`` after it began, in ``step``; ``again``:
    what the next call said; ``wrong``: steps with a wrong result. ``beside`` and ``after``: the same of the program in
    another group, and of the one after a reset. ``child``: what the calls of a forked child have raised.
    ``events``: what it did, by the machine's clock.
    """

    error: dict[str, Any] | None = None
    seconds: float = 0.0
    step: int = -1
    again: str = ""
    wrong: list[int] = field(default_factory=list)
    threads: int = 0
    child: list[dict[str, Any] | None] = field(default_factory=list)
    beside: Seen | None = None
    after: Seen | None = None
    events: list[tuple[float, str]] = field(default_factory=list)

    def note(self, what: str) -> None:
        self.events.append((time.monotonic(), what))


def story(seen: list[Seen | None]) -> str:
    """What the ranks did, in the order of time, for the message of a failed test."""
    told = [(when, rank, what) for rank, s in enumerate(seen) if s is not None for when, what in s.events]
    begin = min(told, default=(0.0,))[0]
    return "\n".join(f"{when - begin:7.3f} s  rank {rank}: {what}" for when, rank, what in sorted(told))


def _finish(device: str, group: Any) -> None:
    """On CUDA a call has come to its end now, and what its group's waits ran into is raised."""
    if device == "cuda":
        torch.cuda.synchronize()
        symm_mem.check(group)


def attempt(seen: Seen, step: int, call: Callable[[], torch.Tensor], group: Any) -> torch.Tensor | None:
    """A call to its end. What it raises is noted, with the time it took."""
    begin = time.monotonic()
    try:
        with forced("fused"):
            got = call()
            _finish(torch.get_default_device().type, group)
    except Exception as e:
        seen.error, seen.seconds, seen.step = fields(e), time.monotonic() - begin, step
        seen.note(f"step {step} in group {group.group_name} raises {type(e).__name__}: {e}")
        return None
    seen.note(f"step {step} in group {group.group_name} is over after {time.monotonic() - begin:.3f} s")
    return got


def steps(
    rank: int, size: int, op: str, fault: Fault, group: Any, deadline: float, events: list[Any]
) -> Seen:
    """The program: STEPS calls, until one fails."""
    seen = Seen(events=events)
    device = torch.get_default_device().type
    unit = 1 if device == "cpu" else 64
    for step in range(STEPS):
        # On CUDA a new size is prepared for by all ranks: a late one would be missed there, not inside the kernel.
        # A call that was left out shows by what the next one says.
        more = step if device == "cpu" or fault.kind == "skip" else 0
        case = OPS[op](rank, size, step, unit, group, more)
        if step == fault.step:
            symm_mem.set_timeout(deadline, group)
        struck = fault.strikes(rank, step)
        if struck:
            seen.note(f"{fault.kind} {fault.point} of step {step}")
        if struck and fault.kind == "skip":
            continue
        if struck and fault.kind == "fork":  # the peers are in their calls meanwhile
            seen.child = in_child(lambda calls=(case.other, case.call): [refusal(call) for call in calls])

        def call(case: Case = case, step: int = step) -> torch.Tensor:
            with fault.at(rank, step) as struck:
                return case.other() if struck and fault.kind == "corrupt" else case.call()

        got = attempt(seen, step, call, group)
        if got is None:
            break
        if not torch.equal(got, case.want()) and not (struck and fault.kind == "corrupt"):
            seen.wrong.append(step)
    return seen


def strike(rank: int, size: int, op: str, fault: Fault, deadline: float, checked: bool) -> Seen:
    """The program with a fault; then the same words again, another group, a reset, and the program without a fault."""
    events: list[Any] = []
    try:
        return _strike(rank, size, op, fault, deadline, checked, events)
    except Exception as e:
        raise AssertionError(story([*[None] * rank, Seen(events=events)])) from e


def _strike(
    rank: int, size: int, op: str, fault: Fault, deadline: float, checked: bool, events: list[Any]
) -> Seen:
    world, other = dist.group.WORLD, other_group()
    symm_mem.set_timeout(VOTE_DEADLINE, world)
    symm_mem.set_checked(checked)
    dist.barrier()
    seen = steps(rank, size, op, fault, world, deadline, events)
    if seen.error is not None and fault.gate is not None and rank != fault.rank:
        fault.gate.seen()
    if seen.error is not None and seen.error["kind"] != "RankMismatch":
        unit = 1 if torch.get_default_device().type == "cpu" else 64
        try:
            with forced("fused"):
                OPS[op](rank, size, 0, unit, world, 0).call()
        except Exception as e:
            seen.again = str(e)
    symm_mem.set_timeout(VOTE_DEADLINE, world)
    if fault.kind == "kill":
        expect_no_reset(world, fault.rank)
        return seen
    none = Fault("delay", -1, -1)
    seen.note("goes on in another group of the same ranks, which has not noticed")
    seen.beside = steps(rank, size, op, none, other, VOTE_DEADLINE, events)
    if not checked:  # ranks that compare have all refused the same call, and nothing is broken
        seen.note("comes to the reset")
        symm_mem.reset(world)
    seen.note("begins anew")
    seen.after = steps(rank, size, op, none, world, VOTE_DEADLINE, events)
    symm_mem.set_checked(False)
    seen.threads = sum(t.name.startswith("weft") for t in threading.enumerate())
    return seen


def expect_no_reset(group: Any, dead: int) -> None:
    """No group is reset without one of its ranks."""
    with pytest.raises(symm_mem.PeerTimeout) as error:
        symm_mem.reset(group)
    assert error.value.culprit == dead and error.value.ended, error.value


def expect_whole(seen: list[Seen]) -> None:
    """No result of any rank was wrong; the other group did not notice, and after the reset all was well."""
    for s in seen:
        assert not s.wrong, story(seen)
        for program in (s.beside, s.after):
            assert program is not None and program.error is None and not program.wrong, story(seen)


def kills(rank: int, size: int, culprit: int, deadline: float) -> list[Seen]:
    """Every op in a group of its own, all well; then a rank is killed, and the others call once more."""
    found = []
    groups = {op: dist.new_group(list(range(size))) for op in OPS}
    unit = 1 if torch.get_default_device().type == "cpu" else 64
    for op, group in groups.items():
        symm_mem.set_timeout(VOTE_DEADLINE, group)
        seen = steps(rank, size, op, Fault("delay", -1, -1), group, VOTE_DEADLINE, [])
        assert seen.error is None and not seen.wrong, story([seen])
    dist.barrier()
    if rank == culprit:
        os.kill(os.getpid(), signal.SIGKILL)
    for op, group in groups.items():
        seen = Seen()
        symm_mem.set_timeout(deadline, group)
        case = OPS[op](rank, size, 0, unit, group, 0)
        attempt(seen, 0, case.call, group)
        with pytest.raises(symm_mem.PeerTimeout) as error, forced("fused"):
            case.call()
        seen.again = str(error.value)
        found.append(seen)
    for group in groups.values():
        symm_mem.set_timeout(VOTE_DEADLINE, group)  # a process with a GPU takes its time to end
        expect_no_reset(group, culprit)
    return found


_other: list[Any] = []


def other_group() -> Any:
    """A second group of all ranks of this process."""
    if not _other:
        _other.append(dist.new_group(list(range(dist.get_world_size()))))
        symm_mem.set_timeout(VOTE_DEADLINE, _other[0])
    return _other[0]


def strikes(rank: int, size: int, op: str, faults: list[Fault], deadline: float) -> list[Seen]:
    """One fault after the other in one group: each time it is reset and goes on.

    ``deadline``: of what is waited for in vain. All else is heard of at once.
    """
    return [
        strike(
            *(rank, size, op, fault),
            deadline if fault.kind in ("delay", "stop") else VOTE_DEADLINE,
            fault.kind in CHECKED,
        )
        for fault in faults
    ]
