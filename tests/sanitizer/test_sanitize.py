"""That sanitize.py tells a tool's findings, its silence and its hanging from a clean run; a stand-in plays the tool."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sanitize

STAND_IN = """#!/bin/sh
while [ $# -gt 0 ]; do
    [ "$1" = --log-file ] && log=$2
    shift
done
echo $$ >> {folder}/started
{act}
"""


@pytest.mark.parametrize(
    ("act", "clean"),
    [
        ('echo "========= ERROR SUMMARY: 0 errors" > $log', True),
        ('echo "========= ERROR SUMMARY: 3 errors" > $log; exit 97', False),
        ("exit 0", False),
        ('echo "========= ERROR SUMMARY: 0 errors" > $log; sleep 100', False),
    ],
)
def test_verdict(tmp_path: Path, act: str, clean: bool) -> None:
    tool = tmp_path / "tool"
    tool.write_text(STAND_IN.format(folder=tmp_path, act=act))
    tool.chmod(0o755)
    seconds = 2 if "sleep" in act else 60  # the limit is the verdict of what hangs alone
    assert sanitize.run("memcheck", str(tool), ranks=2, seconds=seconds, broken=False) is clean
    started = (tmp_path / "started").read_text().split()
    assert len(started) == 2 and not [pid for pid in started if Path(f"/proc/{pid}").exists()]
