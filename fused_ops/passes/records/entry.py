"""What became of one collective."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...dispatch.plan import Plan

# The number that torch gives to a node, as in "mm_3 (mm.default)", and that of a child, as in "layers.3.mlp".
_NODE = re.compile(r"(?<=[A-Za-z])(?:_?\d+)+(?= \([a-z_]\w*(?:\.\w+)*\))")
_CHILD = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$| )")
NOTE = "weft_note"  #: in the meta of a collective: what its entry says more of it, maybe ""


def without_numbers(text: str) -> str:
    """The text, the same for all nodes and modules that differ in their numbers only."""
    return _CHILD.sub("*", _NODE.sub("", text))


def as_ranges(texts: Sequence[str]) -> str:
    """One of the texts, with ranges of numbers where the others have other numbers: "layers.0-2,5.mlp"."""
    numbers = [[int(n) for n in _CHILD.findall(text)] for text in texts]
    columns = iter([_ranges(sorted(set(column))) for column in zip(*numbers, strict=True)])
    return _CHILD.sub(lambda _: next(columns), texts[0])


def _ranges(numbers: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts)


@dataclass(frozen=True)
class Entry:
    """One collective: fused into ``fused_into``, or left alone because of ``reason``.

    Attributes:
        graph: counts the graphs that the pass saw, from 0.
        node: the collective's name in the graph.
        collective: its kind, as torch calls it.
        group: over which it is.
        dim: the dimension along which the fused op gathers or scatters; None when left alone or where there is none.
        fused_into: the op, None when left alone.
        reason: the first condition that failed; "" when fused.
        detail: of a fused one: how many products were fused, and what else.
        source: the line of the model that it comes from; "" where torch kept none.
        form: what was found around the collective, in words; also of one that was found but is not profitable.
        m, n, k: the product that this rank computes, [m, k] @ [k, n], with k = 0 what is reduced without its product;
        None when left alone, or not known before the run.
        gain: microseconds that fusing should save by ``profitability.expected_gain``, less those of operands that it
        copies; None like m, n, k.
        plan: of a fused one on GPUs, how the op's call runs; None where that is not known before the run.
        signature: of its graph, as disagreements name it; "" where ranks are not asked.
        unfused: whether the graph has run, and unfused each time, as ``disagreements`` say.
        module: the innermost module that runs it, as ``layers.3.mlp.down_proj (Linear)``; of a collective of a backward
        graph that of the forward's; "" where torch kept none.
        model: what was compiled, by the name of its class or function; "" where that is not known.
        nbytes: of the whole tensor that it gathers or reduces; None where that is not known before the run.
    """

    graph: int
    node: str
    collective: str
    group: str | None
    dim: int | None = None
    fused_into: str | None = None
    reason: str = ""
    detail: str = ""
    source: str = ""
    form: str = ""
    m: int | None = None
    n: int | None = None
    k: int | None = None
    gain: float | None = None
    module: str = ""
    plan: Plan | None = None
    signature: str = ""
    unfused: bool = False
    nbytes: int | None = None
    model: str = ""

    @property
    def fused(self) -> bool:
        """Whether it runs fused, as far as the graph has run."""
        return self.fused_into is not None and not self.unfused

    def left_alone(self, reason: str) -> Entry:
        """The same collective, found but left alone."""
        fields = (self.graph, self.node, self.collective, self.group)
        kept = {name: getattr(self, name) for name in ("source", "form", "module", "nbytes", "model")}
        return Entry(*fields, reason=reason, **kept)  # type: ignore[arg-type]

    def planned(self, plan: Plan | None) -> Entry:
        """The same with a plan. What runs unfused saves nothing."""
        if plan is None:
            return self
        gain = 0.0 if plan.algorithm == "unfused" and self.gain is not None else self.gain
        return replace(self, plan=plan, gain=gain)

    def noted(self, note: str) -> Entry:
        """The same, which says more of what became of it, or why it was left alone."""
        if self.fused_into is None:
            return replace(self, reason=f"{self.reason}; {note}")
        return replace(self, detail=f"{self.detail}, {note}" if self.detail else note)

    def __str__(self) -> str:
        kind = "" if self.node.startswith(self.collective) else f" ({self.collective})"
        return f"graph {self.graph}{self._of_model()}: {self.node}{kind}{self._where(self.module)}: {self._outcome()}"

    def _of_model(self) -> str:
        return f" of {self.model}" if self.model else ""

    def _where(self, module: str) -> str:
        group = "" if self.group is None else f" over group {self.group!r}"
        return f"{group} in {module}" if module else group

    def _outcome(self) -> str:
        if self.fused_into is not None:
            parts = [f"fused into {self.fused_into}"]
            parts += [] if self.dim is None else [f"dim {self.dim}"]
            parts += [self.detail] if self.detail else []
            if self.gain is not None:
                sizes = f"{self.m} x {self.k} @ {self.k} x {self.n}" if self.k else f"{self.m} x {self.n}"
                parts.append(sizes + (f" should save {self.gain:.3g} us" if self.gain else ""))
            parts += self._as_planned()
            parts += ["but its graph ran unfused each time"] if self.unfused else []
            body = ", ".join(parts)
        else:
            body = f"left alone: {self.reason}"
        form = f"  ({self.form})" if self.form else ""
        return f"{body}{form}{f'  [{self.source}]' if self.source else ''}"

    def _as_planned(self) -> list[str]:
        plan = self.plan
        if plan is None:
            return []
        if plan.algorithm == "unfused":
            return [f"runs unfused: {plan.reason}"]
        us = plan.predicted_us
        text = f"by {plan.algorithm}"
        if us is not None:
            text += f" in {us:.0f} us" if us >= 1000 else f" in {us:.3g} us"
        return [text, plan.reason] if plan.reason else [text]

    def alike(self) -> tuple[str, ...]:
        """The same for entries that differ in the numbers of graphs, nodes and modules only."""
        return (
            self.model,
            self.collective,
            self._where(without_numbers(self.module)),
            without_numbers(self._outcome()),
        )
