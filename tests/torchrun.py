"""Programs that torchrun would start, on ranks that are forked with torch imported, not started anew.

As users start them: the quickstart (test_packaging.py), `bench/run.py` (test_bench_run.py), and with `make programs`
examples/llama_block.py.
"""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks


def run_program(
    program: Path,
    ranks: int,
    *arguments: str,
    env: dict[str, str] | None = None,
    timeout: float = 240,
    cwd: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    """What it prints on all ranks, rank after rank, and the largest of their exit statuses; without GPUs."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if torch.cuda.device_count() else {}
    with socket.socket() as s, tempfile.TemporaryDirectory(prefix="weft-program-") as folder:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
        s.close()
        started = program, list(arguments), env or {}, port, folder, cwd
        codes = run_ranks(_run, ranks, *started, env=hidden, fresh=True, timeout=timeout)
        out, err = (
            "".join((Path(folder) / f"{rank}.{n}").read_text() for rank in range(ranks)) for n in (1, 2)
        )
    return subprocess.CompletedProcess([str(program), *arguments], max(codes), out, err)


def _run(
    rank: int,
    size: int,
    program: Path,
    arguments: list[str],
    env: dict[str, str],
    port: int,
    folder: str,
    cwd: Path | None,
) -> int:
    dist.destroy_process_group()
    torch.use_deterministic_algorithms(False)
    for name in [name for name in os.environ if name.startswith("PYTEST")]:
        del os.environ[name]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", **env}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    for number in (1, 2):
        os.dup2(os.open(f"{folder}/{rank}.{number}", os.O_WRONLY | os.O_CREAT), number)
    sys.argv, sys.path[:0] = [str(program), *arguments], [str(program.parent)]
    os.chdir(cwd or ".")
    try:
        runpy.run_path(str(program), run_name="__main__")
        code: object = 0
    except SystemExit as e:
        code = e.code
        if isinstance(code, str):
            print(code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return code if isinstance(code, int) else int(code is not None)
