"""How many calls of torch's ops and collectives weft has taken, and why it left the others to torch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True)
class CallsTaken:
    """Calls of one of torch's ops in this process, or of a collective in a process group.

    >>> from weft.fused_ops import CallsTaken
    >>> print(CallsTaken("fused_all_gather_matmul", "torch", "A_shard: is torch.float64, ...", 3))
    fused_all_gather_matmul: 3 calls by torch (A_shard: is torch.float64, ...)

    Attributes:
        op: its name in ``torch.ops.symm_mem``, or ``torch.distributed``.
        by: "weft", or "torch" for the implementation that was there before; of collectives "gloo" or "nccl".
        why: of those, why weft did not take them; of weft's, why they ran unfused, "" if they did not.
        count: how many.
    """

    op: str
    by: str
    why: str
    count: int

    def __str__(self) -> str:
        more = f" ({'unfused: ' if self.by == 'weft' else ''}{self.why})" if self.why else ""
        return f"{self.op}: {self.count} call{'s' * (self.count != 1)} by {self.by}{more}"


#: Of this process, by op, taker and reason. Threads may lose a count: that is not worth a lock in each call.
counts: Counter[tuple[str, str, str]] = Counter()
