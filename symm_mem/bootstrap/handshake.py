"""The first steps of a heap: whether the ranks can share memory, and whether their settings are the same."""

from __future__ import annotations

import os
import secrets
from typing import Any

import torch

from ..backends import open_backend
from ..backends.base import Backend
from ..errors import HeapUnavailable, describe
from . import processes
from .rendezvous import Rendezvous


def open_together(rendezvous: Rendezvous, device: torch.device) -> tuple[Backend, str]:
    """The backend and the group's secret, or HeapUnavailable on every rank, in the same words.

    ``to_be_tried`` and ``over_pcie`` then say whether it is so on any rank.
    """
    backend: Backend | None = None
    problem: str | None = None
    identity: dict[str, Any] = {}
    process: dict[str, Any] | None = None
    try:
        backend = open_backend(device)
        identity, process = backend.identity(), processes.identity()
    except Exception as e:
        problem = describe(e)
    posts = rendezvous.gather(
        "make a heap",
        {
            "problem": problem,
            "identity": identity,
            "process": process,
            "settings": _settings(),
            "secret": secrets.token_hex(32),
        },
    )
    # One that cannot be seen although it has just posted is hidden from this one: nothing is known of its end.
    found = [post["process"] for post in posts]
    rendezvous.processes = [None if processes.has_ended(process) else process for process in found]
    rendezvous.check_equal("make a heap", [post["settings"] for post in posts])
    for rank, post in enumerate(posts):
        if post["problem"] is not None:
            raise HeapUnavailable(
                f"no heap for group {rendezvous.group_name!r}: rank {rank}: {post['problem']}"
            )
    assert backend is not None
    reason = backend.refuse([post["identity"] for post in posts], rendezvous.rank)
    answers = rendezvous.gather("share memory", [reason, backend.to_be_tried, backend.over_pcie])
    for answer, *_ in answers:
        if answer is not None:
            raise HeapUnavailable(f"no heap for group {rendezvous.group_name!r}: {answer}")
    backend.to_be_tried = any(tried for _, tried, _ in answers)
    backend.over_pcie = any(over_pcie for *_, over_pcie in answers)
    return backend, posts[0]["secret"]


def _settings() -> dict[str, str]:
    """What must be the same in every rank's environment: a choice may depend on it."""
    private = ("WEFT_TIMEOUT", "WEFT_CACHE_DIR")
    return {k: v for k, v in sorted(os.environ.items()) if k.startswith("WEFT_") and k not in private}
