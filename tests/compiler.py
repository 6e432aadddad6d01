"""torch.compile in tests: without what it measures and checks each time, and nobody looks at."""

from __future__ import annotations

import os
from typing import Any


def leave_out_measurements() -> None:
    """Of this process; torch._dynamo is imported if it was not. Results are the same."""
    from torch._dynamo import guards, trace_rules
    from torch._inductor import config, cpu_vec_isa

    # The time that guards take: to tell it, the processor's caches are emptied, 10 to 30 ms at each compilation.
    guards.profile_guard_manager = lambda *args: 0.0
    # Tables of torch's functions. init_process_group drops them, lest they were made amidst of imports.
    trace_rules.clear_lru_cache = lambda: None
    # Half of the second that g++ takes for a kernel goes into templates of vectors, and into symbols of libtorch that
    # few kernels need: `with_libtorch`.
    cpu_vec_isa.valid_vec_isa_list = list
    config.aot_inductor.link_libtorch = False


def with_libtorch() -> Any:
    """A context, for Inductor's templates and for wrappers in C++."""
    from torch._inductor import config

    return config.patch({"aot_inductor.link_libtorch": True})


def leave_out_checks() -> None:
    """Of this process and its children: Inductor compiles a program for each set of vector instructions that the CPU
    says it has, in each new cache, to see that it has them."""
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
