"""What the pass does with the graph of forward and backward, before AOTAutograd's partitioner runs.

All ranks must change it alike: by the graph, the groups' sizes and the settings. A rank whose graph differs is found by
the vote, but what ranks then run has these changes already. So where only numbers differ that were taken to be the same
on all ranks, the vote raises on each.
"""

from __future__ import annotations

from typing import Any

from torch import fx
from torch._inductor import config as inductor_config
from torch._inductor.custom_graph_pass import CustomGraphPass

from .agreement.signature import note_numbers
from .cache_key import pass_key
from .canonicalize import by_position, name_groups, only_wait_for_pending, wait_once
from .loss_parallel.joint import put_losses_on_columns
from .pass_sequence import in_sequence, one_of_equals, passes_of
from .regather import mark_gathered_again
from .sequence_parallel.find import put_joint_graph_on_rows
from .settings import PassSettings

#: The option of Inductor for passes on the graph of forward and backward.
JOINT_SLOT = "joint_custom_post_pass"


class JointPass(PassSettings, CustomGraphPass):
    """Made by ``FusionPass`` of its settings ``loss_parallel``, ``sequence_parallel`` and ``regather``."""

    def uuid(self) -> Any:
        return f"{pass_key(self)} joint"

    def __call__(self, graph: fx.Graph) -> None:
        by_position(graph)
        name_groups(graph)
        wait_once(graph)
        only_wait_for_pending(graph)
        if self.loss_parallel:
            put_losses_on_columns(graph, self)
        if self.sequence_parallel:
            put_joint_graph_on_rows(graph, self)
        note_numbers(graph)
        if self.regather:
            mark_gathered_again(graph, self)


def joint_options(settings: PassSettings, others: Any = None) -> dict[str, Any]:
    """Inductor's option for ``JointPass`` after ``others``, to which it is set; None for what Inductor's configuration
    has. Empty where no setting needs it."""
    if not (settings.loss_parallel or settings.sequence_parallel or settings.regather):
        return {}
    others = passes_of(getattr(inductor_config, JOINT_SLOT) if others is None else others)
    own = one_of_equals(JointPass(**settings))
    return {JOINT_SLOT: in_sequence([*(each for each in others if each != own), own])}
