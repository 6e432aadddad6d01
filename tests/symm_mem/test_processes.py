"""Whether a peer's process is still there, as far as it can be seen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from weft.symm_mem.bootstrap import processes


def test_a_process_has_ended_once_it_is_certain() -> None:
    me = processes.identity()
    assert not processes.has_ended(me)
    assert processes.has_ended({**me, "started": me["started"] - 1}), (
        "the number was given to another process"
    )
    assert not processes.has_ended({**me, "pid": 2**22 + 1, "namespace": "another machine or container"})
    assert not processes.has_ended(None)


def test_stopped_is_not_ended_and_a_zombie_is() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        known = {**processes.identity(), "pid": child.pid, "started": processes._stat(child.pid)[1]}
        os.kill(child.pid, signal.SIGSTOP)
        assert not processes.has_ended(known)
        os.kill(child.pid, signal.SIGKILL)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # dead and not yet collected
        assert processes.has_ended(known)
    finally:
        child.kill()
        child.wait()
    assert processes.has_ended(known)


def test_a_process_may_have_any_name() -> None:
    name = Path("/proc/self/comm")
    before = name.read_bytes()
    try:
        name.write_bytes(b"a) " + "тренировка".encode()[:11])  # as the kernel cuts off: within a character
        me = processes.identity()
        assert not processes.has_ended(me)
        assert processes.has_ended({**me, "started": me["started"] - 1})
    finally:
        name.write_bytes(before.rstrip(b"\n"))
