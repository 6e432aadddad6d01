"""Which of their kernels both products of 16 bits take, for tests that want them all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

from weft.fused_ops.dispatch import fast_path
from weft.kernels.all_gather_matmul import configs as gather_configs
from weft.kernels.all_gather_matmul import on_cuda as gather_on_cuda
from weft.kernels.device.gemm import one_shot
from weft.kernels.device.tuning.choice import KernelChoices
from weft.kernels.matmul_reduce_scatter import configs as scatter_configs
from weft.kernels.matmul_reduce_scatter import on_cuda as scatter_on_cuda

ALGORITHMS = ("push", "one_shot")

_choices: dict[tuple[str, Any], KernelChoices[Any]] = {}


#: Where each product chooses its exchange in one shot.
ONE_SHOT = ((gather_configs, "choose_one_shot_gather"), (scatter_configs, "choose_one_shot_scatter"))


@contextmanager
def taking(algorithm: str) -> Iterator[None]:
    """Inside the body both products take ``algorithm``, "one_shot" where it can be, whatever their models say of it:
    never where the gathered A is wanted, too.

    Every rank must do so. Kernels that were made before are kept, and so is what the fast path remembers: of each
    algorithm by itself. So calls of both may follow each other.
    """
    assert algorithm in ALGORITHMS
    short, remember = fast_path.run_fast, fast_path.remember_call

    def short_way(op: str, arguments: Any, *more: Any) -> Any:
        return short(op, (algorithm, arguments), *more)

    def remembered(call: fast_path.LaunchedCall, *more: Any, **named: Any) -> None:
        remember(replace(call, arguments=(algorithm, call.arguments)), *more, **named)

    with ExitStack() as stack:
        for where in (gather_on_cuda, scatter_on_cuda):
            known = _choices.setdefault((algorithm, where), KernelChoices())
            stack.enter_context(mock.patch.object(where, "_choices", known))
        stack.enter_context(mock.patch.object(fast_path, "run_fast", short_way))
        stack.enter_context(mock.patch.object(fast_path, "remember_call", remembered))
        if algorithm == "one_shot":
            stack.enter_context(mock.patch.object(one_shot, "exchange_us", return_value=-1e9))
        else:
            for configs, choose in ONE_SHOT:
                stack.enter_context(mock.patch.object(configs, choose, return_value=None))
        yield


@contextmanager
def mixing() -> Iterator[None]:
    """Inside the body about half of the problems that are small enough for one shot push.

    By their sizes: so all ranks do it alike, and nothing is switched from call to call.
    """
    with ExitStack() as stack:
        for (configs, name), columns in zip(ONE_SHOT, ("k", "n"), strict=True):
            choose = getattr(configs, name)

            def some(problem: Any, columns: str = columns, choose: Any = choose) -> Any:
                return None if getattr(problem, columns) // 64 % 2 else choose(problem)

            stack.enter_context(mock.patch.object(configs, name, some))
        yield
