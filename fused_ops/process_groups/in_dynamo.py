"""Dynamo takes a group with weft as it takes torch's own: it breaks the graph at a call, and runs the call as it is."""

from __future__ import annotations

import importlib
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch._C._dynamo import eval_frame
from torch.distributed import ProcessGroup

from .group import WeftProcessGroup


@cache
def see_group_class() -> None:
    """From now on."""
    # After a break Dynamo would compile these methods, and knows no member of a group but torch's. A code object that
    # it skips, with all that is called there, costs a call nothing; ``torch._disable_dynamo`` costs up to 4 us.
    skip = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)
    for name, method in vars(WeftProcessGroup).items():
        if isinstance(method, FunctionType) and callable(getattr(ProcessGroup, name, None)):
            eval_frame.set_code_exec_strategy(method.__code__, skip)
    # Before 2.13 it knows groups of exactly torch's type.
    if torch.torch_version.TorchVersion(torch.__version__) < "2.13":
        variable: Any = importlib.import_module("torch._dynamo.variables.distributed").ProcessGroupVariable
        is_process_group = variable.is_process_group
        variable.is_process_group = staticmethod(
            lambda value: type(value) is WeftProcessGroup or is_process_group(value)
        )
