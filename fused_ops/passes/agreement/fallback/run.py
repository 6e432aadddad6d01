"""Runs of a fallback graph: op by op at first, then compiled without the pass."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import fx

from .....symm_mem import WeftError
from ...graph.nodes import calls
from .kept import DRAWS, KeptGraph, caller_of, unpickled

_log = logging.getLogger("weft.passes")
_OP_BY_OP = 2  # runs with inputs of the same sizes until it is compiled for them
_COMPILED_FOR = 8  # inputs of different sizes for which one graph is kept compiled
_COUNTED = 256  # inputs of different sizes whose runs are counted
#: Op by op they write out all scores: a graph that calls them is compiled before it runs.
_AT_ONCE = ("flex_attention", "flex_attention_backward")
_state = threading.local()


class FallbackRuns:
    """Of one graph.

    One that ``redraws`` must draw the random numbers that another graph draws. Inductor draws a number by its seed and
    its place in the tensor, wherever it stands; op by op the seed is not looked at.

    Args:
        name: of the graph, for messages.
    """

    def __init__(self, name: str, kept: KeptGraph) -> None:
        self._kept, self._name = kept, name
        self._runs: Counter[Any] = Counter()
        self._compiled: dict[Any, Callable[..., Sequence[Any]]] = {}
        self._compiles = True  # until it is tried in vain

    def prepare(self) -> None:
        """Makes what is on the device, which cannot be made while a CUDA graph is captured."""
        _ = self.module

    def run(self, args: list[Any], *, compiles: bool) -> Sequence[Any]:
        """The graph's results. ``args`` are emptied; ``compiles``: whether a compilation may begin now, not in a
        capture.

        Op by op at first: ranks that differ once need no second compilation. Random numbers are drawn by Inductor
        wherever that can be. Others would be as good for this graph, but they move the generator on by another step:
        what ranks draw alike later, they would not any more. WeftError: the graph must be compiled, and cannot be.
        """
        if self._kept.redraws and not (compiles and self._compiles):
            raise WeftError(
                f"graph {self._name}: runs unfused, as ranks do not agree or a CUDA graph is captured, and draws "
                "random numbers that another graph draws, too, as for dropout that is recomputed; op by op it would "
                'draw others. FusionPass(agree="capture") or agree=False fuse it, where all ranks run the same graphs'
            )
        if self._seeds is not None:
            args += fx.Interpreter(self._seeds).run(*args)
        sizes = tuple(_kind_of(value) for value in args)
        if len(self._runs) >= _COUNTED:
            self._runs.clear()
        self._runs[sizes] += 1
        run = self._compiled.get(sizes)
        if run is None and compiles and self._compiles and (self._draws or self._runs[sizes] > _OP_BY_OP):
            run = self._compile(args, sizes)
        if run is None:
            return fx.Interpreter(self.module).boxed_run(args)  # type: ignore[no-any-return]
        given = list(args)
        args.clear()
        return run(*given)

    def _compile(self, args: list[Any], sizes: Any) -> Any:
        if len(self._compiled) == _COMPILED_FOR:
            self._compiled.clear()
            self._runs.clear()
        try:
            with compiling_fallback():
                self._compiled[sizes] = torch._inductor.compile(unpickled(self._kept.graph), list(args))  # type: ignore[assignment]
        except Exception as e:
            self._compiles = False
            said = f"{type(e).__name__}: {e}"
            if self._kept.redraws:
                raise WeftError(
                    f"graph {self._name}: cannot be compiled as it was, and op by op would draw other random numbers "
                    f"than the graph that draws them, too: {said}"
                ) from e
            _log.warning("graph %s: cannot be compiled as it was, and runs op by op: %s", self._name, said)
        return self._compiled.get(sizes)

    @cached_property
    def _draws(self) -> bool:
        """Whether it is compiled at its first run."""
        nodes = self.module.graph.nodes
        return self._kept.redraws or any(calls(n, *DRAWS) or caller_of(n) in _AT_ONCE for n in nodes)

    @cached_property
    def module(self) -> fx.GraphModule:
        return unpickled(self._kept.graph)

    @cached_property
    def _seeds(self) -> fx.GraphModule | None:
        return None if self._kept.seeds is None else unpickled(self._kept.seeds)


def _kind_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    return value


@contextlib.contextmanager
def compiling_fallback() -> Iterator[None]:
    """What is compiled inside is a graph as it was: for the pass, too, where Inductor's settings name one for all that
    is compiled. It would be fused and ask once more, and its fallback graph be compiled in turn."""
    _state.in_fallback = True
    try:
        yield
    finally:
        _state.in_fallback = False


def is_fallback_graph() -> bool:
    """Whether what this thread compiles is a fallback graph."""
    return getattr(_state, "in_fallback", False)
