"""What ranks find done, as the server that they are forked from imports this (ranks.py): the first compilation of a
process, which makes tables and asks for the compiler, takes half a second more than those that follow.
"""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import ranks  # noqa: F401
import torch
import torch.distributed.tensor.experimental
import weft.fused_ops.library.inductor
import weft.fused_ops.passes.backend  # noqa: F401
from compiler import leave_out_measurements
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config


def _forget_the_way_here() -> None:
    """This folder comes first in PYTHONPATH for the import of this file alone."""
    _, _, rest = os.environ.pop("PYTHONPATH").partition(os.pathsep)
    if rest:
        os.environ["PYTHONPATH"] = rest


def _compile() -> None:
    # Without gradients: a process that has computed some has threads of autograd's, if torch knows other devices.
    torch.compile(lambda x, w: (x @ w).relu())(torch.ones(2, 3), torch.ones(3, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


_forget_the_way_here()
leave_out_measurements()
with contextlib.suppress(ImportError):
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # a process with threads is not forked
with (
    mock.patch.dict(os.environ),
    functorch_config.patch(enable_autograd_cache=False),
    inductor_config.patch(fx_graph_cache=False, compile_threads=1),
):
    _compile()
