"""Runs of a fallback graph: op by op at first, then compiled without the pass."""

from __future__ import annotations

import base64
import contextlib
import io
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch
from torch._dynamo.exc import TorchDynamoException

from .....symm_mem import WeftError
from .called import CalledGraph, CallingGraph, CannotCompile, function_of

_log = logging.getLogger("weft.passes")
_OP_BY_OP = 2  # runs until it is compiled
_state = threading.local()


class FallbackRuns:
    """Of one graph.

    One that ``redraws`` must draw the random numbers that another graph draws. Inductor draws a number by its seed and
    its place in the tensor, wherever it stands; op by op the seed is not looked at.

    Args:
        name: of the graph, for messages.
        packed: what ``KeptGraph.packed`` gave.
    """

    def __init__(self, name: str, packed: Mapping[str, Any]) -> None:
        self.code: str = packed["code"]
        self._called: Mapping[str, CalledGraph] = packed["called"]
        self._constants: str | None = packed["constants"]
        self._redraws: bool = packed["redraws"]
        self._seeds: str | None = packed["seeds"]
        self._name = name
        self._count = 0
        self._compiles = True  # until it is tried in vain

    def prepare(self) -> None:
        """Makes what is on the device, which cannot be made while a CUDA graph is captured."""
        _ = self._namespace

    def run(self, args: list[Any], *, compiles: bool) -> Sequence[Any]:
        """The graph's results. ``args`` are emptied.

        Op by op at first: ranks that differ once need no second compilation. Random numbers are drawn by Inductor
        wherever that can be. Others would be as good for this graph, but they move the generator on by another step:
        what ranks draw alike later, they would not any more.

        Args:
            compiles: whether a compilation may begin now; not in a capture.

        Raises:
            WeftError: the graph must be compiled, and cannot be.
        """
        self._count += 1
        if self._redraws and not (compiles and self._compiles):
            raise WeftError(
                f"graph {self._name}: runs unfused, as ranks do not agree or a CUDA graph is captured, and draws "
                "random numbers that another graph draws, too, as for dropout that is recomputed; op by op it would "
                'draw others. FusionPass(agree="capture") or agree=False fuse it, where all ranks run the same graphs'
            )
        if self._draw_seeds is not None:
            args += self._draw_seeds(self._namespace, list(args))
        compiles = compiles and self._compiles and (self._draws or self._count > _OP_BY_OP)
        if self._called:
            return self._run_calling(args, compiles)
        if not compiles:
            return self._function(self._namespace, args)  # type: ignore[no-any-return]
        inputs = list(args)  # they are needed again if this cannot be compiled
        try:
            with compiling_fallback():
                return self._compiled(self._namespace, args)  # type: ignore[no-any-return]
        except TorchDynamoException as e:  # raised before anything has run
            self._cannot(e)
        return self._function(self._namespace, inputs)  # type: ignore[no-any-return]

    def _run_calling(self, args: list[Any], compiles: bool) -> Sequence[Any]:
        if compiles:
            try:
                with compiling_fallback():
                    return self._calling.compiled(args)
            except CannotCompile as e:
                self._cannot(e)
        return self._calling.op_by_op(args)

    def _cannot(self, error: Exception) -> None:
        self._compiles = False
        if self._redraws:
            raise WeftError(
                f"graph {self._name}: cannot be compiled as it was, and op by op would draw other random numbers than "
                f"the graph that draws them, too: {error}"
            ) from error
        _log.warning("graph %s: cannot be compiled as it was, and runs op by op: %s", self._name, error)

    @cached_property
    def _draws(self) -> bool:
        """Whether it is compiled at its first run."""
        return (
            self._redraws
            or "inductor_lookup_seed" in self.code
            or (bool(self._called) and self._calling.at_once)
        )

    @cached_property
    def _compiled(self) -> Any:
        return torch.compile(self._function)

    @cached_property
    def _function(self) -> Any:
        return function_of(self.code)

    @cached_property
    def _draw_seeds(self) -> Any:
        return None if self._seeds is None else function_of(self._seeds)

    @cached_property
    def _calling(self) -> CallingGraph:
        return CallingGraph(self.code, self._called, vars(self._namespace))

    @cached_property
    def _namespace(self) -> SimpleNamespace:
        if self._constants is None:
            return SimpleNamespace()
        return SimpleNamespace(**torch.load(io.BytesIO(base64.b64decode(self._constants))))


@contextlib.contextmanager
def compiling_fallback() -> Iterator[None]:
    """What is compiled inside is a graph as it was: for the pass, too, where Inductor's settings name one for all that
    is compiled. It would be fused and ask once more, and its way out be compiled in turn.
    """
    _state.in_fallback = True
    try:
        # Whoever forbids to compile again means the program's graphs, which are none the worse for this one.
        with torch.compiler.set_stance("default"):
            yield
    finally:
        _state.in_fallback = False


def is_fallback_graph() -> bool:
    """Whether what this thread compiles is a way out."""
    return getattr(_state, "in_fallback", False)
