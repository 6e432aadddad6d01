"""On what a run was made: versions, GPUs, settings; no path, no host's name and no serial number."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import triton

ROOT = Path(__file__).resolve().parent.parent
UNKNOWN = "unknown"
CPU_NOTE = "CPU ranks: the protocol, for tests; such times say nothing of GPUs"
_SETTINGS = ("WEFT_", "NCCL_", "TORCH_SYMM_MEM_")
_OF_A_HOST = ("NCCL_COMM_ID", "NCCL_HOSTID")


def join_ranks(on: str = "") -> torch.device:
    """The process group of a torchrun: "cuda" with NCCL, "cpu" with gloo. This rank's device.

    Args:
        on: by default "cuda", if there is a GPU for each local rank.
    """
    # A rank alone at a collective is to fail soon, not after half an hour; others may still compile.
    patience = timedelta(seconds=600)
    if on == "cpu" or (not on and torch.cuda.device_count() < int(os.environ["LOCAL_WORLD_SIZE"])):
        dist.init_process_group("gloo", timeout=patience)
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", timeout=patience, device_id=device)
    return device


def device_name(device: str) -> str:
    """ "h200" for "NVIDIA H200"."""
    if device == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name()
    return re.sub(r"[^a-z0-9]+", "-", name.removeprefix("NVIDIA ").split()[0].lower())


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def commit(root: Path = ROOT) -> tuple[str, bool | None]:
    """(the commit, whether other files than results differ from it); ("unknown", None) outside of git."""
    if not (root / ".git").exists():  # what git finds above would be another project's
        return UNKNOWN, None
    found = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changed = _output("git", "-C", str(root), "status", "--porcelain", "--", ".", ":!bench/results")
    if found is None or changed is None:
        return UNKNOWN, None
    return found, bool(changed)


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that weft, NCCL and torch's ops read; "set" where the value could say which machine it is."""
    host = platform.node().split(".")[0] or "/"  # "" would be in every value
    return {
        name: "set" if "/" in value or host in value or name in _OF_A_HOST else value
        for name, value in sorted(environment.items())
        if name.startswith(_SETTINGS)
    }


def described(device: str, world: int) -> dict[str, Any]:
    """What the results file of a run says of the machine and the code; ``device`` is "cuda" or "cpu"."""
    revision, dirty = commit()
    found = {
        "device": device_name(device),
        "world": world,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": revision,
        "dirty": dirty,
        "settings": settings(os.environ),
    }
    if device == "cuda":
        driver = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        found |= {
            "gpus": [torch.cuda.get_device_name(i) for i in range(min(world, torch.cuda.device_count()))],
            "driver": driver.splitlines()[0] if driver else UNKNOWN,
            "cuda": torch.version.cuda,
            "nccl": ".".join(str(part) for part in torch.cuda.nccl.version()),
        }
    return found
