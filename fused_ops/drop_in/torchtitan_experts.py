"""torchtitan's tokens to the ranks of their experts by ``moe_dispatch`` and ``moe_combine``. It imports torchtitan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchtitan.config import override
from torchtitan.config.override import derive
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from ..expert_parallel import MoeHandle, moe_combine, moe_dispatch


class WeftTokenDispatcher(AllToAllTokenDispatcher):  # type: ignore[misc]
    """Whose host reads no sizes. Without expert parallelism it is torchtitan's own."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):  # type: ignore[misc]
        pass

    def wire_meshes(self, *, ep_mesh: Any) -> None:
        super().wire_meshes(ep_mesh=ep_mesh)
        self.group = "" if ep_mesh is None else ep_mesh.get_group().group_name

    def dispatch(self, x: Tensor, scores: Tensor, expert_ids: Tensor, counts: Tensor) -> tuple[Any, ...]:
        if self.ep_mesh is None:
            return super().dispatch(x, scores, expert_ids, counts)  # type: ignore[no-any-return]
        rows, offs, handle = moe_dispatch(x, expert_ids, self.num_experts, self.group)
        return rows, offs.diff(prepend=offs.new_zeros(1)), (handle, scores)

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        if self.ep_mesh is None:
            return super().combine(rows, metadata, x)  # type: ignore[no-any-return]
        handle, scores = metadata
        return moe_combine(rows, MoeHandle(*handle), scores, self.group)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="tokens by weft's moe_dispatch")
def weft_experts(config: Any) -> Any:
    """What ``override.imports`` names: ``"weft.fused_ops.drop_in.torchtitan_experts.weft_experts"``."""
    return derive(config, WeftTokenDispatcher.Config)
