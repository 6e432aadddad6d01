"""A pass where it is copied, pickled, printed, written as json, and run beside another one."""

from __future__ import annotations

import gc
import json
import pickle
from collections.abc import Callable
from copy import copy, deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import weft
from graphs import AG, captured, fake_ranks, gather
from torch import Tensor, fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass
from weft.fused_ops.passes import FusionPass, pass_sequence
from weft.fused_ops.passes.backend import _with_pass, weft_backend
from weft.fused_ops.passes.joint import JOINT_SLOT
from weft.fused_ops.passes.keep_grouped import BEFORE_FUSION, _SchedulerPass, grouped_options
from weft.fused_ops.passes.norms.eps_as_number import eps_options
from weft.fused_ops.passes.pass_sequence import SLOT, passes_of


def test_the_text_of_a_pass_is_its_settings() -> None:
    named = (
        "groups=None, strict=False, fuse='auto', agree=True, regather=False, collectives='auto', "
        "sequence_parallel=False, loss_parallel=False, reorder=False"
    )
    assert repr(FusionPass()) == f"FusionPass({named})"
    settings = {"strict": True, "fuse": "always", "agree": "capture", "regather": True, "collectives": True}
    settings["sequence_parallel"] = "auto"
    given = FusionPass(groups=["b", "a"], reorder=0.5, **settings)
    named = (
        "groups=['a', 'b'], strict=True, fuse='always', agree='capture', regather=True, collectives=True, "
        "sequence_parallel='auto'"
    )
    assert repr(given) == f"FusionPass({named}, loss_parallel=False, reorder=0.5)"


def test_a_copy_is_the_pass_itself() -> None:
    """So that its report is filled by whatever torch makes of the options."""
    fusion = FusionPass()
    assert copy(fusion) is fusion and deepcopy(fusion) is fusion


def test_a_pickled_pass_is_the_pass_itself_and_elsewhere_one_of_its_settings() -> None:
    with fake_ranks(2) as name:
        fusion = FusionPass(groups=[torch.distributed.group.WORLD], strict=True, agree=False)
        captured(lambda x, w: gather(x) @ w, torch.randn(4, 8), torch.randn(8, 6), fusion=fusion)
        pickled, key = pickle.dumps(fusion), fusion.uuid()
        assert pickle.loads(pickled) is fusion
        del fusion  # as in another process
        gc.collect()
        loaded, again = pickle.loads(pickled), pickle.loads(pickled)
        assert (loaded.groups, loaded.strict, loaded.fuse, loaded.agree) == ({name}, True, "auto", False)
        assert loaded.uuid() == key and not loaded.report().entries
        assert again is loaded


JOINT = {"sequence_parallel": True, "loss_parallel": True, "regather": True}


@pytest.mark.parametrize("settings", [{}, {"sequence_parallel": "auto"}, {"regather": True}, JOINT])
@pytest.mark.parametrize("takes_a_list", [True, False])
def test_options_are_the_same_each_time(
    monkeypatch: pytest.MonkeyPatch, takes_a_list: bool, settings: dict[str, Any]
) -> None:
    """For other options torch compiles each of a model's layers anew, and stops after some."""
    monkeypatch.setattr(pass_sequence, "_TAKES_A_LIST", takes_a_list)
    fusion, other = FusionPass(reorder=True, **settings), Other()
    first = fusion.options
    assert first.keys() == {SLOT, BEFORE_FUSION, *eps_options(), *([JOINT_SLOT] if settings else [])}
    assert all(fusion.options[name] is first[name] for name in first)
    assert pickle.loads(pickle.dumps(first)) == first
    assert fusion.options_with(other) == fusion.options_with(other) != first
    assert _with_pass(None, {}, fusion) == _with_pass(None, {}, fusion)
    assert FusionPass(reorder=True, **settings).options != first
    for each in passes_of(first.get(JOINT_SLOT)):
        copied = pickle.loads(pickle.dumps(each))
        assert copied == each and hash(copied) == hash(each)
        assert each != FusionPass(**each) and each != {**each}


def test_a_compiled_model_is_saved_with_its_pass(tmp_path: Path) -> None:
    fusion = FusionPass(fuse="always")
    model = torch.compile(nn.Linear(3, 3), options=fusion.options)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    assert torch.equal(loaded.weight, model.weight)


def test_json_has_the_settings() -> None:
    written = json.loads(json.dumps(FusionPass(groups=["tp"]).options))
    settings = {"groups": ["tp"], "strict": False, "fuse": "auto", "agree": True, "regather": False}
    settings |= {"collectives": "auto", "sequence_parallel": False, "loss_parallel": False, "reorder": False}
    assert written["post_grad_custom_post_pass"] == settings


def test_a_generation_config_prints_its_pass() -> None:
    transformers = pytest.importorskip("transformers")
    fusion = FusionPass()
    config = transformers.GenerationConfig(
        compile_config=transformers.CompileConfig(options=fusion.options, mode=None)
    )
    for text in (repr(config), config.to_json_string(use_diff=False)):
        assert '"agree": true' in text
    assert deepcopy(config).compile_config.options["post_grad_custom_post_pass"] is fusion
    assert hash(config) == hash(deepcopy(config))


def test_two_passes_of_the_same_settings_are_two() -> None:
    assert FusionPass() != FusionPass()
    assert len({FusionPass(), FusionPass()}) == 2


class Other(CustomGraphPass):
    """Makes ``sin`` of ``cos``, and tells which ops it saw."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen += [str(n.target) for n in graph.nodes if n.op == "call_function"]
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.cos.default):
            node.target = torch.ops.aten.sin.default

    def uuid(self) -> Any:
        return "other"


@pytest.mark.parametrize("takes_a_list", [True, False])
def test_two_passes_in_one_place(monkeypatch: pytest.MonkeyPatch, takes_a_list: bool) -> None:
    """As a list where torch takes one, and as one pass where it does not: torch 2.11."""
    if takes_a_list and not pass_sequence._TAKES_A_LIST:
        pytest.skip("torch takes one pass only")
    monkeypatch.setattr(pass_sequence, "_TAKES_A_LIST", takes_a_list)
    torch._dynamo.reset()
    with fake_ranks(2), inductor_config.patch(fx_graph_cache=False):
        fusion, other = FusionPass(), Other()

        def fn(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
            return gather(x) @ w, x.cos()

        x = torch.randn(4, 8)
        _, y = torch.compile(fn, options=fusion.options_with(other))(x, torch.randn(8, 6))
    assert fusion.report().entries[0].fused_into == AG
    assert not any("weft" in target for target in other.seen)
    torch.testing.assert_close(y, x.sin())


def test_what_a_pass_returns_goes_to_no_other() -> None:
    # PatternMatcherPass.apply returns how many it has found.
    graph, seen = fx.Graph(), list[fx.Graph]()
    pass_sequence.PassSequence((lambda graph: len(graph.nodes) + 1, seen.append))(graph)
    assert seen == [graph]


def test_the_key_of_two_passes_is_that_of_both() -> None:
    fusion, other = FusionPass(), Other()
    both = pass_sequence.PassSequence([other, fusion])
    assert both.uuid() == ["other", fusion.uuid()]
    assert pass_sequence.PassSequence([lambda graph: None, fusion]).uuid() is None
    assert deepcopy(both) is both
    assert fusion.options_with() == fusion.options


@pytest.mark.parametrize("key", ["nodes", None])
def test_nothing_is_kept_of_a_scheduler_pass_without_a_key(key: str | None) -> None:
    class Nodes(_SchedulerPass):  # type: ignore[misc]
        def __call__(self, nodes: list[Any]) -> list[Any]:
            return nodes

        def uuid(self) -> str | None:
            return key

    both = grouped_options(FusionPass(reorder=True), Nodes())[BEFORE_FUSION]
    assert isinstance(both, _SchedulerPass) == (key is not None)  # Inductor keeps nothing of another kind


ONE_OF_THREE = {"agree": "'capture'", "collectives": "'auto'", "sequence_parallel": "'auto'"}
REFUSED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"groups": "tp"}, TypeError, "is the string 'tp'"),
    ({"groups": 1.5}, TypeError, "is 1.5, must be a list of groups"),
    ({"fuse": "sometimes"}, ValueError, "is 'sometimes', must be 'auto' or 'always'"),
    *[
        ({name: wrong}, TypeError, f"is {wrong!r}, must be True or False")
        for name in ("strict", "regather")
        for wrong in (None, "no", 1)
    ],
    *[
        ({name: "no"}, ValueError, f"is 'no', must be True, False or {one}")
        for name, one in ONE_OF_THREE.items()
    ],
    *[({name: 1}, TypeError, f"is 1, must be True, False or {one}") for name, one in ONE_OF_THREE.items()],
    ({"reorder": 1}, TypeError, "is 1, must be True or False, or how much more memory"),
    ({"reorder": -0.5}, ValueError, "is -0.5, must be 0 or more"),
    ({"loss_parallel": 1.5}, TypeError, "is 1.5, must be True or False, or the bytes of a rank's logits"),
    ({"loss_parallel": -1}, ValueError, "is -1, must be 0 or more"),
    ({"order": True}, TypeError, "is no setting, must be one of groups, strict"),
]


@pytest.mark.parametrize(("given", "error", "words"), REFUSED, ids=lambda given: str(given)[:24])
def test_what_is_no_setting_is_refused(given: dict[str, Any], error: type[Exception], words: str) -> None:
    (name,) = given
    with pytest.raises(error, match=f"^{name}: {words}"):
        FusionPass(**given)


def test_what_settings_stand_for() -> None:
    assert FusionPass().sequence_parallel is False
    assert [FusionPass(reorder=r).reorder for r in (False, True, 0.0, 0.5)] == [None, 0.0, 0.0, 0.5]
    assert [FusionPass(loss_parallel=b).logits for b in (False, True, 0, 500)] == [0, 256 << 20, 0, 500]
    with fake_ranks(2):
        changed: list[dict[str, Any]] = [
            {"collectives": True},
            *({"sequence_parallel": s} for s in (True, "auto")),
        ]
        assert len({FusionPass(**each).uuid() for each in ({}, *changed)}) == 4


def test_what_is_no_pass_is_refused() -> None:
    with pytest.raises(TypeError, match=r"others: has 'other', must be passes"):
        FusionPass().options_with("other")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "compile_with", [torch.compile, partial(torch.compile, backend=weft_backend), weft.compile]
)
def test_a_pass_in_place_of_its_options_is_refused(compile_with: Callable[..., Any]) -> None:
    said = r"options: is FusionPass\(groups=None, .*, must be its options: torch.compile\(model, options=fusion.options"
    torch._dynamo.reset()
    with pytest.raises((TypeError, BackendCompilerFailed), match=said):
        compile_with(torch.sin, options=FusionPass())(torch.randn(3))
    assert dict(FusionPass().items())["fuse"] == "auto"
