"""What a FusionPass is made with, checked, and in the forms in which settings travel: json, pickle, text."""

from __future__ import annotations

import sys
import weakref
from collections.abc import ItemsView, Iterable
from functools import partial
from typing import Any
from uuid import uuid4

from ...symm_mem import Group, group_name

AUTO = "auto"
CAPTURE = "capture"
#: All of them, in the order in which they are said.
DEFAULTS: dict[str, Any] = {
    "groups": None,
    "strict": False,
    "fuse": AUTO,
    "agree": True,
    "regather": False,
    "collectives": AUTO,
    "sequence_parallel": False,
    "loss_parallel": False,
    "reorder": False,
}
LOGITS_BYTES = 256 << 20  # 2048 rows of 65,536 columns in 16 bits: what a chunk of them takes anyway


def _setting(name: str, default: Any = True) -> Any:
    return property(lambda settings: default if settings[name] is True else settings[name])


class PassSettings(dict[str, Any]):
    """Settings by name, as ``FusionPass`` takes them, with groups as sorted names.

    A dict for json alone: transformers writes the options of a compilation wherever it prints a GenerationConfig, and
    json takes no other object. Those of one class with the same settings are equal: for options that differ torch
    compiles anew.
    """

    strict: bool = _setting("strict")
    fuse: str = _setting("fuse")
    agree: bool | str = _setting("agree")
    collectives: bool | str = _setting("collectives")
    sequence_parallel: bool | str = _setting("sequence_parallel")
    loss_parallel: bool | int = _setting("loss_parallel")
    regather: bool = _setting("regather")
    logits: int = _setting("loss_parallel", LOGITS_BYTES)  #: bytes of a rank's that go by chunks

    def __init__(self, **settings: Any) -> None:
        if unknown := sorted(settings.keys() - DEFAULTS.keys()):
            raise TypeError(f"{unknown[0]}: is no setting, must be one of {', '.join(DEFAULTS)}")
        chosen = {**DEFAULTS, **settings}
        groups: Iterable[Group] | None = chosen["groups"]
        if isinstance(groups, str):
            raise TypeError(f"groups: is the string {groups!r}, must be a list of groups")
        if groups is not None and not isinstance(groups, Iterable):
            raise TypeError(f"groups: is {groups!r}, must be a list of groups")
        for name in ("strict", "regather"):
            if not isinstance(chosen[name], bool):
                raise TypeError(f"{name}: is {chosen[name]!r}, must be True or False")
        for name, word in (("agree", CAPTURE), ("collectives", AUTO), ("sequence_parallel", AUTO)):
            if not isinstance(chosen[name], bool | str):
                raise TypeError(f"{name}: is {chosen[name]!r}, must be True, False or {word!r}")
            if isinstance(chosen[name], str) and chosen[name] != word:
                raise ValueError(f"{name}: is {chosen[name]!r}, must be True, False or {word!r}")
        _check_number(
            "reorder", chosen["reorder"], float, "how much more memory it may need, as a part of it"
        )
        _check_number("loss_parallel", chosen["loss_parallel"], int, "the bytes of a rank's logits")
        if chosen["fuse"] not in (AUTO, "always"):
            raise ValueError(f"fuse: is {chosen['fuse']!r}, must be 'auto' or 'always'")
        names = None if groups is None else sorted({group_name(g) for g in groups})
        super().__init__(chosen | {"groups": names})

    @property
    def groups(self) -> frozenset[str] | None:
        """Names of the groups whose collectives are fused, None for all."""
        return None if self["groups"] is None else frozenset(self["groups"])

    @property
    def reorder(self) -> float | None:
        """How much more memory a new order may need, as a part of it; None for no new order."""
        given = self["reorder"]
        return None if given is False else 0.0 if given is True else float(given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and dict.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), **self), ()


class OnePass(PassSettings):
    """Settings of a pass that is one of its own, with what it has seen: equal to itself alone, also after pickling."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._enter(uuid4().hex)

    def _enter(self, name: str) -> None:
        self._name = name
        _there[name] = self

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        # For copies, too, which AOTInductor and transformers make of options: a report would be that of a copy.
        return _unpickled, (type(self), self._name, {**self})

    def items(self) -> ItemsView[str, Any]:  # type: ignore[override]
        # torch.compile reads options so, and would say that Inductor has no option "groups".
        if sys._getframe(1).f_globals.get("__name__") == "torch":
            raise TypeError(refused_as_options(self))
        return super().items()


def refused_as_options(given: PassSettings) -> str:
    return f"options: is {given!r}, must be its options: torch.compile(model, options=fusion.options)"


_there: weakref.WeakValueDictionary[str, OnePass] = weakref.WeakValueDictionary()


def _unpickled(kind: type[OnePass], name: str, settings: dict[str, Any]) -> OnePass:
    """The pass itself; in a process that does not have it another one of the same settings."""
    if (there := _there.get(name)) is None:
        there = kind(**settings)
        there._enter(name)
    return there


def _check_number(name: str, value: Any, kind: Any, must: str) -> None:
    if not isinstance(value, bool | kind):
        raise TypeError(f"{name}: is {value!r}, must be True or False, or {must}")
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}: is {value!r}, must be 0 or more")
