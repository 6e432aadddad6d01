"""Checkpoints of the parallel layers, for any number of ranks."""

from weft.fused_ops import local_state_dict, sharded_state_dict

__all__ = ["local_state_dict", "sharded_state_dict"]
