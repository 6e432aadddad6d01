"""torch.compile in tests: without what it measures and checks each time, and nobody looks at."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

_as_it_was: dict[str, Any] = {}


def collect_seldom() -> None:
    """What is there already is looked through for garbage no more: modules and thousands of tests. Of a compilation's
    objects few are garbage, and looking for it took a twentieth of the tests' time."""
    gc.enable()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def leave_out_measurements() -> None:
    """Of this process; torch._dynamo is imported if it was not. Results are the same."""
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import guards, trace_rules
    from torch._functorch._aot_autograd import graph_compile
    from torch._inductor import codecache, config, cpu_vec_isa
    from torch._inductor.runtime import triton_compat

    # The time that guards take: to tell it, the processor's caches are emptied, 10 to 30 ms at each compilation.
    guards.profile_guard_manager = lambda *args: 0.0
    # Expressions that guards have in common are looked for, longer than it takes to evaluate them.
    guards.PyExprCSEPass = _LeftAsTheyAre
    # Garbage is looked for, 10 ms after each compilation, and graphs are printed for a trace that nobody keeps.
    dynamo_config.run_gc_after_compile = False
    graph_compile._log_joint_graph = lambda *args: None
    graph_compile._log_fw_bw_graphs = lambda *args: (None, None)
    # Tables of torch's functions. init_process_group drops them, lest they were made amidst of imports.
    trace_rules.clear_lru_cache = lambda: None
    # All files of torch and of triton are read for the key of a cache: half a second of each process.
    codecache.torch_key.clear()
    codecache.torch_key.set(f"{torch.__version__} {torch.version.git_version}".encode())
    triton_compat.triton_key = lambda: triton_compat.triton.__version__
    # Half of the second that g++ takes for a kernel goes into templates of vectors, and into symbols of libtorch that
    # few kernels need: `whole_inductor`.
    _as_it_was.setdefault("instructions", cpu_vec_isa.valid_vec_isa_list)
    cpu_vec_isa.valid_vec_isa_list = list
    config.aot_inductor.link_libtorch = False


class _LeftAsTheyAre:
    """In place of torch's PyExprCSEPass."""

    def count(self, expressions: list[str]) -> None:
        pass

    def replace(self, expression: str) -> tuple[list[str], str]:
        return [], expression


@contextlib.contextmanager
def whole_inductor() -> Iterator[None]:
    """With vectors, and linked with libtorch: FlexAttention's template and wrappers in C++ need that."""
    from torch._inductor import config, cpu_vec_isa

    instructions = _as_it_was.get("instructions", cpu_vec_isa.valid_vec_isa_list)
    with (
        mock.patch.object(cpu_vec_isa, "valid_vec_isa_list", instructions),
        config.patch({"aot_inductor.link_libtorch": True}),
    ):
        yield


def leave_out_checks() -> None:
    """Of this process and its children: Inductor compiles a program for each set of vector instructions that the CPU
    says it has, in each new cache, to see that it has them."""
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")
