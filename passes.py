"""The graph pass, what its reports are made of, and what measures for it."""

import weft.fused_ops.passes as _passes
from weft.fused_ops import timeline
from weft.fused_ops.passes import *  # noqa: F403

__all__ = ["timeline"]
__all__ += _passes.__all__
