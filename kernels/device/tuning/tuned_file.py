"""Tuned configurations on disk: the fastest for each kind of call.

A file for each GPU, number of ranks, and version of CUDA and of all kernels, in the cubins' folder. It says what it is
for: a file that cannot be read, or is for something else, counts as missing. Writers replace it as a whole. Of two that
do so at once one may lose what it added: that is measured again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from cuda.bindings import nvrtc

from ..jit.program import DEVICE_FOLDER, cache_folder, write_whole

_KERNELS = DEVICE_FOLDER.parent


class TunedFile:
    """Of ``world_size`` ranks on GPUs of this name."""

    def __init__(self, gpu: str, world_size: int) -> None:
        self._is_for = {"gpu": gpu, "world_size": world_size, "version": _version()}

    @property
    def place(self) -> Path:
        gpu = re.sub(r"\W+", "-", str(self._is_for["gpu"]))
        name = f"tuned-{gpu}-x{self._is_for['world_size']}-{self._is_for['version']}.json"
        return cache_folder() / name

    def read(self) -> dict[str, str]:
        """The configuration for each kind of call, as text; nothing where there is no such file."""
        try:
            found = json.loads(self.place.read_text())
        except (OSError, ValueError, RecursionError):
            return {}
        if not isinstance(found, dict) or found.get("for") != self._is_for:
            return {}
        kinds = found.get("kinds")
        if not isinstance(kinds, dict):
            return {}
        return {kind: config for kind, config in kinds.items() if isinstance(config, str)}

    def add(self, kinds: dict[str, str]) -> None:
        """Add these to what others have entered."""
        content = {"for": self._is_for, "kinds": dict(sorted((self.read() | kinds).items()))}
        with contextlib.suppress(OSError):  # what cannot be kept is measured again
            write_whole(self.place, json.dumps(content, indent=1).encode())


@cache
def _version() -> str:
    """Of CUDA's compiler and of all kernels with their launchers: another version's times say nothing."""
    digest = hashlib.sha256(repr(nvrtc.nvrtcVersion()[1:]).encode())
    for path in sorted(_KERNELS.rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh"):
            digest.update(f"{path.relative_to(_KERNELS)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
