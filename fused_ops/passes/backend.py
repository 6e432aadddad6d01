"""``torch.compile(model, backend="weft")`` and ``weft.compile``: Inductor with the pass, settings by name.

pyproject.toml names ``weft_backend`` to torch (entry points ``torch_dynamo_backends``).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch._inductor import config as inductor_config

from .fusion import FusionPass
from .pass_sequence import SLOT, in_sequence, passes_of
from .records.models import chosen
from .records.report import Report
from .records.seen import SeenGraphs
from .settings import DEFAULTS, PassSettings, refused_as_options

#: What names a setting of the pass among the options of a compilation.
PREFIX = "weft."
_VARIABLE = "WEFT_PASS"
_FLAGS: dict[str, bool] = {"0": False, "1": True}
_NUMBERS: dict[str, Any] = {"reorder": float, "loss_parallel": int}
_IN_ENVIRONMENT = tuple(name for name in DEFAULTS if name != "groups")
_OF_TORCH_COMPILE = ("fullgraph", "dynamic", "disable", "name", "recompile_limit", "isolate_recompiles")

_made: dict[Any, FusionPass] = {}


def compile(  # noqa: A001
    model: Any = None,
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    fusion: FusionPass | None = None,
    **settings: Any,
) -> Any:
    """``torch.compile`` with the pass, and with ``mode`` and ``options`` beside it.

    >>> import torch, torch.distributed as dist
    >>> import weft
    >>> from torch.distributed._functional_collectives import all_gather_tensor
    >>> def model(x, w):
    ...     return all_gather_tensor(x, 0, dist.group.WORLD) @ w
    >>> x, w = torch.randn(4, 8), torch.randn(8, 6)
    >>> y = weft.compile(model, mode="max-autotune-no-cudagraphs", dynamic=False)(x, w)
    >>> torch.testing.assert_close(y, model(x, w))

    Without a model it decorates: ``@weft.compile(fullgraph=True)``. The pass runs after those that Inductor would run
    in its place: of ``options``, else of ``torch._inductor.config.post_grad_custom_post_pass``.

    Args:
        model: a module or a function; changed as ``torch.compile`` changes it.
        mode: one of torch.compile's: its options are taken, and those of ``options`` over them.
        options: Inductor's, by name.
        fusion: the pass, to read its report. None takes that of the settings, whose report is in ``fusion_report()``.
        settings: of ``FusionPass`` (groups, strict, fuse, agree, regather, collectives, sequence_parallel,
            loss_parallel, reorder; those not given by the environment: ``WEFT_PASS="fuse=always,agree=0"``), or of
            ``torch.compile`` (fullgraph, dynamic, disable, name, recompile_limit, isolate_recompiles; as far as the
            installed torch has them).

    Returns:
        what torch.compile returns.

    Raises:
        TypeError: a setting that neither has; one of the pass beside ``fusion``; what FusionPass refuses.
        ValueError: what FusionPass refuses, or of an environment variable; an option that Inductor does not have.
    """
    for_torch = {name: value for name, value in settings.items() if name in _OF_TORCH_COMPILE}
    for_pass = {name: value for name, value in settings.items() if name not in _OF_TORCH_COMPILE}
    if unknown := sorted(for_pass.keys() - DEFAULTS.keys()):
        known = ", ".join([*DEFAULTS, *_OF_TORCH_COMPILE])
        raise TypeError(f"{unknown[0]}: is no setting, must be one of {known}")
    if fusion is not None and not isinstance(fusion, FusionPass):
        raise TypeError(f"fusion: is {fusion!r}, must be a FusionPass")
    if fusion is not None and for_pass:
        raise TypeError(f"{next(iter(for_pass))}: is given with fusion, which has settings of its own")
    chosen, given = _settings_of(for_pass, options or {})
    resolved = _with_pass(mode, given, fusion or _pass_of(chosen), dynamic=settings.get("dynamic"))
    return torch.compile(model, options=resolved, **for_torch)


def weft_backend(
    graph: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Any:
    """What ``torch.compile(model, backend="weft")`` calls for each graph: Inductor with the pass.

    >>> import torch
    >>> from weft.fused_ops.passes.backend import weft_backend
    >>> y = torch.compile(torch.sin, backend=weft_backend, options={"weft.agree": False})(torch.randn(3))

    Args:
        graph: Dynamo's.
        inputs: its inputs.
        mode: as torch.compile takes it, which takes none beside options.
        options: Inductor's, and those of FusionPass with the prefix "weft.": ``{"weft.fuse": "always"}``.

    Raises:
        ValueError, TypeError: as ``weft.compile``. torch.compile wraps them in a BackendCompilerFailed.
    """
    from torch._inductor.compile_fx import compile_fx  # takes seconds

    chosen, given = _settings_of({}, options or {})
    return compile_fx(graph, list(inputs), config_patches=_with_pass(mode, given, _pass_of(chosen)))


def _reset_graphs() -> None:
    """What torch._dynamo.reset() does for Inductor's own backend: it lets go of captured CUDA graphs."""
    if (trees := sys.modules.get("torch._inductor.cudagraph_trees")) is not None:
        trees.reset_cudagraph_trees()


weft_backend.reset = _reset_graphs  # type: ignore[attr-defined]


def fusion_report(model: Any = None) -> Report:
    """What became of the collectives of the models that were compiled by ``backend="weft"`` or ``weft.compile``.

    >>> import torch
    >>> import weft
    >>> model = weft.compile(torch.nn.Linear(8, 6))
    >>> y = model(torch.randn(4, 8))
    >>> weft.passes.fusion_report(model).left
    0

    Settings that differ make passes of their own, which count their graphs from 0 each. Where there are several models
    the text names that of each graph.

    Args:
        model: a module or a function whose report it is, as it was before or after it was compiled: of all graphs that
            were compiled for a call of it, with what it calls, such as layers that are compiled each, and their
            backwards. Of two models of one class Dynamo may give the second the graphs of the first, which then are in
            the report of both. None for all models.

    Returns:
        the reports of their passes as one. That of a ``fusion`` of your own is not among them. Runs of graphs that are
        alike count for each model that has one; ``programs`` are those of the process.

    Raises:
        TypeError: ``model`` cannot be called.
        ValueError: nothing was compiled for it: neither it nor what it calls was compiled with weft and called.
    """
    made = [*_made.values()]
    seen = [fusion._seen for fusion in made]
    if model is not None:
        wanted = chosen(
            model, [models for each in seen for models in (*(g.models for g in each.graphs), *each.keys)]
        )
        seen = [each.only(wanted) for each in seen]
    if not made:
        return Report()
    entries = [e for fusion, graphs in zip(made, seen, strict=True) for e in fusion._applied(graphs)]
    together = SeenGraphs((g for each in seen for g in each.graphs), (k for each in seen for k in each.keys))
    asked = (None,) if model is None else {entry.signature for entry in entries} - {""}
    # Of the process, so those of any one pass; that made first has seen the most.
    return made[0]._report(entries, together, asked=asked)


def _settings_of(
    settings: Mapping[str, Any], options: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """FusionPass's settings, and the options for Inductor alone."""
    if isinstance(options, PassSettings):
        raise TypeError(refused_as_options(options))
    chosen = {**_environment(), **settings}
    given = {}
    for name, value in options.items():
        if not name.startswith(PREFIX):
            given[name.replace("-", "_")] = value
            continue
        if (setting := name.removeprefix(PREFIX)) not in DEFAULTS:
            known = ", ".join(PREFIX + each for each in DEFAULTS)
            raise ValueError(f"options: has {name!r}, must have one of {known}")
        chosen[setting] = value
    return chosen, given


def _environment() -> dict[str, Any]:
    """Settings of ``WEFT_PASS="fuse=always,agree=0"``."""
    found: dict[str, Any] = {}
    for part in filter(None, map(str.strip, os.environ.get(_VARIABLE, "").split(","))):
        setting, _, text = map(str.strip, part.partition("="))
        if setting not in _IN_ENVIRONMENT or not text:
            known = ", ".join(_IN_ENVIRONMENT)
            raise ValueError(f"{_VARIABLE}: has {part!r}, must have setting=value of {known}")
        found[setting] = _FLAGS.get(text, text)
        if setting in _NUMBERS and text not in _FLAGS:
            with suppress(ValueError):
                found[setting] = _NUMBERS[setting](text)
    try:
        PassSettings(**found)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{_VARIABLE}: {e}; True and False are 1 and 0 there") from e
    return found


def _pass_of(settings: Mapping[str, Any]) -> FusionPass:
    """One pass for equal settings: torch.compile compares options, and would compile once more for another."""
    checked = PassSettings(**settings)
    key = repr(checked)
    if key not in _made:
        _made[key] = FusionPass(**checked)
    return _made[key]


def _with_pass(
    mode: str | None, options: Mapping[str, Any], fusion: FusionPass, *, dynamic: bool | None = None
) -> dict[str, Any]:
    """Inductor's options, with the pass after what they, or Inductor's configuration, have in its place."""
    import torch._inductor

    known = set(torch._inductor.list_options()) | {"guard_filter_fn", "use_aoti"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(f"options: has {unknown[0]!r}, must have options of Inductor (see list_options())")
    of_mode = torch._inductor.list_mode_options(mode, dynamic) if mode else {}
    there = passes_of(options[SLOT] if SLOT in options else getattr(inductor_config, SLOT))
    if any(isinstance(each, FusionPass) for each in there):  # the user's own
        return {**of_mode, **options, SLOT: in_sequence(there)}
    return {**of_mode, **fusion._options_over(options, there)}
