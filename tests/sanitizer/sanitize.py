"""Small runs of every kernel under compute-sanitizer, one process a GPU: `tests/sanitizer/sanitize.py --ranks 4`.

memcheck looks at every access to global and shared memory, TMA copies included; racecheck at shared memory and at the
fences between the generic proxy and TMA; synccheck at barriers. torch's allocator is told not to keep memory, so that
each tensor is an allocation of its own, and what lies after it is out of bounds. The heap is one mapping: inside it
an overrun shows in the results, which are compared.

It ends with 0 when no tool has found anything and every result is right. `--broken` stores past the end of a tensor on
purpose: the command must fail then, or it would not see what it is there for.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

TOOLS = {"memcheck": [], "racecheck": ["--racecheck-report", "all"], "synccheck": []}
FOUND = 97  # what a tool exits with when it has found something
# Kernels of torch are not looked at: they are many, and not ours.
NOT_OURS = "2at6native"  # of the namespace at::native, mangled
ENVIRONMENT = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
    "OMP_NUM_THREADS": "1",
    "WEFT_UNTESTED": "1",  # also kernels that have no run to show yet
    "WEFT_NVRTC_OPTIONS": "--generate-line-info --define-macro=RACECHECK",  # see kernels/device/ptx/hopper.cuh
}


def find() -> str | None:
    """compute-sanitizer: on the path, in the CUDA toolkit, or in the wheel nvidia-cuda-sanitizer-api."""
    toolkits = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    candidates = [Path(t) / "bin" / "compute-sanitizer" for t in toolkits if t]
    candidates += sorted(
        Path(sysconfig.get_path("purelib")).glob("nvidia/*/compute-sanitizer/compute-sanitizer")
    )
    named = os.environ.get("COMPUTE_SANITIZER")
    found = shutil.which(named or "compute-sanitizer")
    return found or next((str(c) for c in candidates if not named and c.exists()), None)


def command(tool: str, program: str, rank: int, log: Path, *args: str) -> list[str]:
    """Everything of one tool's run of a rank."""
    return [
        program,
        *("--tool", tool, *TOOLS[tool]),
        *("--error-exitcode", str(FOUND), "--log-file", str(log), "--print-limit", "20"),
        *("--port", str(49152 + 100 * rank)),  # each tool talks to its process through ports of its own
        *("--report-api-errors", "no") * (tool == "memcheck"),
        *("--kernel-name-exclude", f"kns={NOT_OURS}"),
        *(sys.executable, str(Path(__file__).with_name("small_runs.py")), *args),
    ]


@contextmanager
def processes(
    commands: list[list[str]], env: dict[str, str], outputs: list[Path]
) -> Iterator[list[subprocess.Popen]]:
    """Run them at once, each with its children in a group of its own; nothing is left behind."""
    started: list[subprocess.Popen] = []
    try:
        for line, output in zip(commands, outputs, strict=True):
            with output.open("w") as file:
                started.append(
                    subprocess.Popen(line, env=env, stdout=file, stderr=file, start_new_session=True)
                )
        yield started
    finally:
        for process in started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(tool: str, program: str, ranks: int, seconds: float, broken: bool, gpus: int | None = None) -> bool:
    """One tool over all small runs on all ranks. False: it has found something, or did not come to its end.

    ``gpus``: the ranks share so many, and take turns on them.
    """
    # The ranks' waits are ended by --seconds, not before: under a tool everything is slow.
    env = {**os.environ, **ENVIRONMENT, "WEFT_TIMEOUT": str(10 * seconds)}
    more = ["--broken"] if broken else []
    if gpus is not None:
        env["WEFT_SHARE_GPUS"] = "1"
        more.append(f"--gpus={gpus}")
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="weft-sanitizer-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(ranks)]
        outputs = [Path(folder) / f"rank{rank}.out" for rank in range(ranks)]
        port = str(store.port)
        lines = [
            command(tool, program, rank, log, str(rank), str(ranks), port, *more)
            for rank, log in enumerate(logs)
        ]
        with processes(lines, env, outputs) as started:
            while time.monotonic() - start < seconds and any(p.poll() is None for p in started):
                time.sleep(0.1)
            codes = [p.poll() for p in started]
        fine = True
        for rank, code in enumerate(codes):
            said = logs[rank].read_text() if logs[rank].exists() else ""
            verdict = re.findall(r"(ERROR SUMMARY: .*|RACECHECK SUMMARY: .*)", said)
            ended = "did not end in time" if code is None else f"exit code {code}"
            print(
                f"{tool}: rank {rank}: {ended}; {'; '.join(verdict) or 'the tool said nothing'}", flush=True
            )
            if code != 0 or not verdict:
                fine = False
                print(said[-6000:], outputs[rank].read_text()[-3000:], sep="\n")
    print(f"{tool}: {time.monotonic() - start:.0f} s", flush=True)
    return fine


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--share", type=int, metavar="GPUS", help="the ranks share so many GPUs: slower still"
    )
    parser.add_argument("--tools", default="memcheck,racecheck", help="synccheck, too")
    parser.add_argument("--seconds", type=float, default=280, help="for each tool")
    parser.add_argument("--broken", action="store_true", help="store past the end of a tensor: must fail")
    args = parser.parse_args()
    tools = args.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools: {', '.join(sorted(unknown))}: must be of {', '.join(TOOLS)}")
    program = find()
    if program is None:
        sys.exit(
            "compute-sanitizer is missing: it comes with the CUDA toolkit, or as nvidia-cuda-sanitizer-api by pip"
        )
    there, needed = torch.cuda.device_count(), args.ranks if args.share is None else args.share
    if args.ranks < 2 or not 1 <= needed <= there:
        sys.exit(
            f"--ranks, --share: {args.ranks} ranks on {needed} GPUs, must be 2 or more, on 1 to {there} GPUs"
        )
    results = [run(tool, program, args.ranks, args.seconds, args.broken, args.share) for tool in tools]
    sys.exit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
