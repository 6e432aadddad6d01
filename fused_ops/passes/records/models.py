"""Of which model a graph is: what is being called when Dynamo compiles it."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn

#: By the module of a frame of torch's: its variable that is what is called, or what was compiled.
_VARIABLES = {"torch.nn.modules.module": "self", "torch._dynamo.eval_frame": "fn"}


@dataclass(frozen=True)
class Model:
    """A module or function. It may be gone.

    Attributes:
        name: of its class or itself, with a number from the second of a name on.
        code: by which Dynamo knows it; models of one code may share graphs.
    """

    name: str
    code: Any


_models: weakref.WeakKeyDictionary[Any, Model] = weakref.WeakKeyDictionary()
_names: Counter[str] = Counter()
#: By what torch keeps of a compilation until its backward is compiled, too, which is when nothing is being called.
_compiled: weakref.WeakKeyDictionary[Any, tuple[Model, ...]] = weakref.WeakKeyDictionary()


def _unwrapped(model: Any) -> Any:
    """What was compiled, of what torch.compile returned."""
    model = inspect.unwrap(getattr(model, "_orig_mod", model))
    return model.__self__ if isinstance(getattr(model, "__self__", None), nn.Module) else model


def _of(model: Any) -> Model:
    if model not in _models:
        is_module = isinstance(model, nn.Module)
        named = type(model) if is_module else model
        name = getattr(named, "__qualname__", type(model).__qualname__).rpartition("<locals>.")[2]
        _names[name] += 1
        number = f" #{_names[name]}" if _names[name] > 1 else ""
        function = inspect.unwrap(type(model).forward if is_module else model)
        _models[model] = Model(name + number, getattr(function, "__code__", name + number))
    return _models[model]


def _called() -> Iterator[tuple[Any, bool]]:
    """Modules and functions that are being called, the innermost first, and whether they were compiled."""
    frame = sys._getframe()
    while frame := frame.f_back:  # type: ignore[assignment]
        # Of torch's frames alone: asked for, a frame's locals are kept until it ends.
        if (variable := _VARIABLES.get(frame.f_globals.get("__name__", ""))) is None:
            continue
        try:  # whatever a model's own attributes do, it is compiled
            found = _unwrapped(frame.f_locals[variable]) if variable in frame.f_locals else None
            is_torchs = str(getattr(found, "__module__", "torch.")).startswith("torch.")
            if isinstance(found, fx.GraphModule) or (is_torchs and not isinstance(found, nn.Module)):
                continue
            _of(found)
        except Exception:
            continue
        yield found, variable == "fn"


def models_of_now() -> tuple[Model, ...]:
    """Those to which belongs what is being compiled: what was compiled first, then all that is being called."""
    context = getattr(torch._guards, "TracingContext", None)
    now = context and context.try_get()
    if now is None or now not in _compiled:
        called = [*_called()]
        first = [model for model, was_compiled in called if was_compiled][:1]
        models = tuple(dict.fromkeys(_of(model) for model in (*first, *(m for m, _ in called))))
        if now is None:
            return models
        _compiled[now] = models
    return _compiled[now]


def compilation_of_now() -> tuple[int, int] | None:
    """Which frame Dynamo compiles, and how many times it has before; None where no frame is compiled."""
    now = torch._guards.CompileContext.current_compile_id()
    if now is None or now.frame_id is None or now.frame_compile_id is None:
        return None
    return now.frame_id, now.frame_compile_id


def chosen(model: Any, seen: Collection[tuple[Model, ...]]) -> Callable[[tuple[Model, ...]], bool]:
    """Which of the graphs with these models are of this one, or of those that have compiled for it. ValueError: none
    is."""
    if not callable(model):
        raise TypeError(f"model: is {model!r}, must be a module or a function")
    mine = _of(_unwrapped(model))
    if any(mine in models for models in seen):
        return lambda models: mine in models
    if any(mine.code == other.code for models in seen for other in models):
        return lambda models: any(mine.code == other.code for other in models)
    raise ValueError(
        f"model: is {mine.name}, for which weft has compiled nothing; must be one compiled by "
        'torch.compile(model, backend="weft") or weft.compile(model), and called since. What a FusionPass of your '
        "own has compiled is in its report()"
    )
