"""What ranks are forked with: torch, its compiler and weft imported, and what a first compilation makes for itself.

The server that ranks are forked from imports this, and nothing else does (ranks.py). Patterns, tables and the hash of
torch's sources take a second of each process that compiles. Nothing here may leave a thread behind: ranks would have
the locks that it holds, and not the thread.
"""

from __future__ import annotations

import gc
import os


def prepare() -> None:
    """Import, and compile what needs no kernel of its own: g++ is waited for by a thread."""
    import pytest  # noqa: F401
    import torch
    import torch._inductor.compile_fx
    import torch.distributed.tensor.experimental
    import torch.utils.cpp_extension
    import weft.fused_ops.passes.fusion  # noqa: F401
    from compiler import leave_out_measurements
    from torch._dynamo.utils import counters
    from torch._functorch import config as functorch_config
    from torch._inductor import config as inductor_config
    from tqdm import tqdm

    leave_out_measurements()
    tqdm.monitor_interval = 0  # else a thread
    if (
        torch.cuda.device_count()
    ):  # Inductor asks a GPU for its name, and where CUDA has begun nobody may fork
        return
    for kept in (False, True):  # without the caches all is compiled, with them torch's sources are hashed
        with (
            inductor_config.patch(fx_graph_cache=kept),
            functorch_config.patch(enable_autograd_cache=kept, force_non_lazy_backward_lowering=True),
        ):
            torch.compile(torch.matmul)(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))
        torch._dynamo.reset()
    counters.clear()


# ranks.py put this folder in front.
os.environ["PYTHONPATH"] = os.environ["PYTHONPATH"].partition(os.pathsep)[2]
gc.disable()  # much comes, and nothing of it goes
prepare()
assert len(os.listdir("/proc/self/task")) == 1
gc.enable()
gc.set_threshold(20_000, 20, 50)  # else a twelfth of a compilation goes into looking through what lives on
gc.collect()
gc.freeze()
