"""What ranks have before they are forked (ranks.py): torch with its compiler, the compiler's tables and patterns.

The server imports this module. What it has found, no rank looks for: it takes a second, at a rank's first graph.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed
import weft.fused_ops  # noqa: F401
from compiler import leave_out_measurements
from torch import Tensor, fx
from torch._functorch import config as functorch_config
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes
from torch._inductor.virtualized import V

FOUND_BY = "WEFT_TEST_PYTHONPATH"  #: PYTHONPATH as it was before ranks.py added this folder


def compile_something() -> None:
    """Forward and backward through Dynamo, AOTAutograd and the passes over graphs, but no code, so no threads."""

    def inner_compile(gm: fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any) -> Callable[..., Any]:
        with V.set_fake_mode(torch._guards.detect_fake_mode(example_inputs)):
            post_grad_passes(gm, bool(kwargs.get("is_inference")))
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: list[Any]) -> Any:
        return compile_fx(gm, example_inputs, inner_compile=inner_compile)

    def fn(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(x @ w).sum()

    with (
        functorch_config.patch(force_non_lazy_backward_lowering=True, enable_autograd_cache=False),
        inductor_config.patch(fx_graph_cache=False),
    ):
        torch.compile(fn, backend=backend)(torch.ones(4, 8, requires_grad=True), torch.ones(8, 4))
    torch._dynamo.reset()


def find_the_rest() -> None:
    """What the first graph would import and hash on its way to code. Inside of torch: other versions may have less."""
    with suppress(ImportError, AttributeError):
        from torch._inductor.codecache import CacheBase, torch_key
        from torch._inductor.codegen.common import init_backend_registration
        from torch.utils import cpp_extension  # noqa: F401

        torch_key()
        CacheBase.get_system()
        init_backend_registration()


def prepare() -> None:
    before = os.environ.pop(FOUND_BY)
    os.environ.pop("PYTHONPATH")
    if before:
        os.environ["PYTHONPATH"] = before
    leave_out_measurements()
    with suppress(ImportError):
        from tqdm import tqdm

        tqdm.monitor_interval = 0  # no thread of its own
    compile_something()
    find_the_rest()
    gc.collect()
    gc.freeze()  # no rank copies all of it to look for garbage there


if FOUND_BY in os.environ:
    prepare()
