"""What a process holds: memory, descriptors, threads. The soak measures it when no call is under way."""

from __future__ import annotations

import gc
import os
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from weft.symm_mem.heap.heap import Heap

sys.path.insert(0, str(Path(__file__).parents[1]))
from threads import staying_threads

MIB = 1 << 20
# What may be added between the first measurement and the last: allocators keep what was freed.
SLACK = {"resident": 64 * MIB, "device": 64 * MIB, "tensors": 1 * MIB}


@dataclass(frozen=True)
class Usage:
    """``resident``, ``heap``, ``device`` (a rank's share of the GPU memory in use), ``tensors`` (torch's) in bytes."""

    resident: int
    heap: int
    device: int
    tensors: int
    descriptors: int
    threads: int

    @staticmethod
    def measure(heaps: list[Heap], on_device: int = 1) -> Usage:
        """``on_device``: ranks whose memory is in use on this rank's GPU."""
        gc.collect()
        threads = staying_threads()  # first: what leaves has memory and descriptors, too
        cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
        if cuda:
            torch.cuda.synchronize()
            free, total = torch.cuda.mem_get_info()
        with open("/proc/self/statm") as f:
            resident = int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return Usage(
            resident,
            sum(heap.capacity for heap in heaps),
            (total - free) // on_device if cuda else 0,
            torch.cuda.memory_allocated() if cuda else 0,
            len(os.listdir("/proc/self/fd")),
            threads,
        )

    def grown(self, before: Usage) -> list[str]:
        """What has grown since ``before`` by more than it may."""
        return [
            f"{f.name}: {getattr(before, f.name)} -> {getattr(self, f.name)}"
            for f in fields(self)
            if getattr(self, f.name) - getattr(before, f.name) > SLACK.get(f.name, 0)
        ]

    def __str__(self) -> str:
        parts = [f"resident {self.resident / MIB:.1f} MiB", f"heap {self.heap / MIB:.0f} MiB"]
        if self.device:
            parts += [f"GPU {self.device / MIB:.0f} MiB", f"tensors {self.tensors / MIB:.1f} MiB"]
        return ", ".join([*parts, f"{self.descriptors} descriptors", f"{self.threads} threads"])
