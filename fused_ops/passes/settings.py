"""What a FusionPass is made with, checked, and in the forms in which settings travel: json, pickle, text."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar

from ...symm_mem import Group, group_name

if TYPE_CHECKING:
    from typing_extensions import Unpack

FUSE = ("auto", "always")
CAPTURE, RUN_AHEAD = "capture", "ahead"
_Self = TypeVar("_Self", bound="PassSettings")


class PassOptions(TypedDict, total=False):
    """Settings of a FusionPass that are off unless they are given: what each does stands there."""

    regather: bool
    collectives: bool
    reorder: bool | float


_OPTIONS = tuple(PassOptions.__annotations__)


class PassSettings(dict[str, Any]):
    """Settings by name, as ``FusionPass`` takes them, with groups as sorted names.

    A dict for json alone: transformers writes the options of a compilation wherever it prints a GenerationConfig, and
    json takes no other object. Two passes of the same settings are two passes: they compare by identity.
    """

    def __init__(
        self,
        groups: Iterable[Group] | None,
        strict: bool,
        fuse: str = "auto",
        agree: bool | str = True,
        **options: Unpack[PassOptions],
    ) -> None:
        if isinstance(groups, str):
            raise TypeError(f"groups: is the string {groups!r}, must be a list of groups")
        if groups is not None and not isinstance(groups, Iterable):
            raise TypeError(f"groups: is {groups!r}, must be a list of groups")
        if not isinstance(strict, bool):
            raise TypeError(f"strict: is {strict!r}, must be True or False")
        if not isinstance(agree, bool | str):
            raise TypeError(f"agree: is {agree!r}, must be True, False, {RUN_AHEAD!r} or {CAPTURE!r}")
        if isinstance(agree, str) and agree not in (RUN_AHEAD, CAPTURE):
            raise ValueError(f"agree: is {agree!r}, must be True, False, {RUN_AHEAD!r} or {CAPTURE!r}")
        for name, value in options.items():
            if name not in _OPTIONS:
                raise TypeError(
                    f"{name}: is no setting, must be one of groups, strict, fuse, agree, {', '.join(_OPTIONS)}"
                )
            allowed = isinstance(value, bool) or (name == "reorder" and isinstance(value, float))
            if not allowed:
                part = ", or how much more memory it may need, as a part of it" if name == "reorder" else ""
                raise TypeError(f"{name}: is {value!r}, must be True or False{part}")
        if not 0 <= options.get("reorder", False) < float("inf"):
            raise ValueError(f"reorder: is {options['reorder']!r}, must be 0 or more")
        if fuse not in FUSE:
            raise ValueError(f"fuse: is {fuse!r}, must be 'auto' or 'always'")
        names = None if groups is None else sorted({group_name(g) for g in groups})
        chosen = {name: options.get(name, False) for name in _OPTIONS}
        super().__init__(groups=names, strict=strict, fuse=fuse, agree=agree, **chosen)

    @property
    def groups(self) -> frozenset[str] | None:
        """Names of the groups whose collectives are fused, None for all."""
        return None if self["groups"] is None else frozenset(self["groups"])

    @property
    def strict(self) -> bool:
        return bool(self["strict"])

    @property
    def fuse(self) -> str:
        return str(self["fuse"])

    @property
    def collectives(self) -> bool:
        return bool(self["collectives"])

    @property
    def agree(self) -> bool | str:
        return self["agree"]  # type: ignore[no-any-return]

    @property
    def regather(self) -> bool:
        return bool(self["regather"])

    @property
    def reorder(self) -> float | None:
        """How much more memory a new order may need, as a part of it; None for no new order."""
        given = self["reorder"]
        return None if given is False else 0.0 if given is True else float(given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.items())})"

    __eq__ = object.__eq__
    __ne__ = object.__ne__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __copy__(self: _Self) -> _Self:
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        # AOTInductor and transformers copy options: the report would be that of a copy, which nobody holds.
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Settings alone: what a pass has seen is this process's.
        return partial(type(self), **self), ()
