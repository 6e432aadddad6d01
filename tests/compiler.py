"""torch.compile in tests: without what it measures and checks each time, and nobody looks at."""

from __future__ import annotations

import os


def leave_out_measurements() -> None:
    """Of this process; torch._dynamo is imported if it was not. Results are the same."""
    from torch._dynamo import guards, trace_rules

    # The time that guards take: to tell it, the processor's caches are emptied, 10 to 30 ms at each compilation.
    guards.profile_guard_manager = lambda *args: 0.0
    # Tables of torch's functions. init_process_group drops them, lest they were made amidst of imports.
    trace_rules.clear_lru_cache = lambda: None


def leave_out_checks() -> None:
    """Of this process and its children: Inductor compiles a program for each set of vector instructions that the CPU
    says it has, in each new cache, to see that it has them."""
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
