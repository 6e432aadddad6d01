"""Several passes in the one place that Inductor has for one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import fx
from torch._inductor import custom_graph_pass
from torch._inductor.custom_graph_pass import CustomGraphPass

#: The option of Inductor that is that place.
SLOT = "post_grad_custom_post_pass"
# From torch 2.13.
_TAKES_A_LIST = hasattr(custom_graph_pass, "get_custom_graph_passes")


@dataclass(frozen=True)
class InTurn:
    """Runs one pass after the other, each on what the one before returns.

    Equal to one of equal passes, as lists of them are: for options that differ torch compiles anew.
    """

    passes: tuple[Any, ...]

    def __call__(self, given: Any) -> Any:
        for each in self.passes:
            given = each(given)
        return given

    def uuid(self) -> Any:
        """None, with which nothing is cached, where one of them has none."""
        keys = [getattr(each, "uuid", lambda: None)() for each in self.passes]
        return keys if all(keys) else None

    def __deepcopy__(self, memo: dict[int, Any]) -> InTurn:
        # Like FusionPass, so that its report stays the one that the user holds.
        return self


class PassSequence(InTurn, CustomGraphPass):
    """All on the same graph, whatever they return, for a torch whose option takes one."""

    def __call__(self, graph: fx.Graph) -> None:
        for each in self.passes:
            each(graph)


def in_sequence(passes: Sequence[Callable[[fx.Graph], None]]) -> Any:
    """What ``post_grad_custom_post_pass`` is set to, so that all of them run, in this order. TypeError: one of them
    cannot be called."""
    for each in passes:
        if not callable(each):
            raise TypeError(f"others: has {each!r}, must be passes: each a function of a torch.fx.Graph")
    if len(passes) == 1:
        return passes[0]
    return [*passes] if _TAKES_A_LIST else PassSequence(tuple(passes))


@lru_cache
def one_of_equals(own: Any) -> Any:
    """The same object for equal ones: for other options torch compiles anew."""
    return own


def passes_of(value: Any) -> list[Any]:
    """The passes that ``post_grad_custom_post_pass`` is set to."""
    if value is None:
        return []
    if isinstance(value, InTurn):
        return [*value.passes]
    return [*value] if isinstance(value, list | tuple) else [value]


def names_of(passes: Sequence[Any]) -> str:
    """For messages."""
    return ", ".join(getattr(each, "__qualname__", type(each).__qualname__) for each in passes)
