"""``weft.install()``: the fused ops of ``torch.ops.symm_mem`` run on weft, wherever they are called from.

Kernels are registered over torch's in the dispatcher, for CUDA, and for CPU where there are none. So a call is weft's
in eager mode, in compiled graphs, which call the op by name, and where Inductor's ``_micro_pipeline_tp`` has put it;
and who holds ``torch.ops.symm_mem.fused_all_gather_matmul`` or its ``default`` holds what they held before. A function
put into the place of the op would be seen by some of them only, and Dynamo would trace into it.
"""

from __future__ import annotations

import os
import warnings

import torch
import torch.compiler.config

from ...symm_mem.switches import is_on
from ..library import compiled
from .all_to_all_vdev import EXCHANGES, exchange_on_weft
from .calls_taken import CallsTaken, counts
from .symm_mem_ops import DEVICES, OPS, Switch, matmul_on_weft

#: Part of the key of torch.compile's caches: a graph is ordered otherwise. These ops have a group's name only, and a
#: cached program of so many ranks would be taken for one of others.
_TAG = f" symm_mem on weft of {os.environ.get('WORLD_SIZE', '?')}"

_library: torch.library.Library | None = None


def install() -> None:
    """The fused matmuls of ``torch.ops.symm_mem`` run on weft from now on.

    >>> import torch, torch.distributed as dist
    >>> import weft
    >>> weft.install()
    >>> x, w = torch.randn(4, 8), torch.randn(8, 6)
    >>> A, (y,) = torch.ops.symm_mem.fused_all_gather_matmul(x, [w], 0, dist.group.WORLD.group_name)
    >>> torch.testing.assert_close(y, A @ w)
    >>> weft.drop_in.uninstall()

    They are ``fused_all_gather_matmul`` and ``fused_matmul_reduce_scatter``, and those of fp8 operands,
    ``fused_all_gather_scaled_matmul`` and ``fused_scaled_matmul_reduce_scatter``, where a dtype of the result is given.

    Results are those of torch's ops but for rounding, with their strides; there are no gradients, as with torch's. What
    torch refuses, it refuses still. Calls that weft cannot take go to torch's implementation in the same call:
    other dtypes (float64), GPUs that are no Hopper or cannot address each other's memory. ``installed_calls()`` counts
    both. CPU ranks have the ops, too: torch has none for them.

    So do ``all_to_all_vdev``, ``all_to_all_vdev_2d`` and ``all_to_all_vdev_2d_offset``, whose splits stay on the
    device: on CUDA they need no NVSHMEM then. An ``out`` that is too small is an error, and nothing is written past it.

    All ranks must install, or none. In graphs that are compiled from now on these ops keep the order of the program,
    like all of weft's. The all-reduces of ``torch.ops.symm_mem`` stay torch's.

    ``WEFT_INSTALL=1`` installs when torch is imported, by an entry point of the installed distribution (torch loads
    those of ``torch.backends`` unless TORCH_DEVICE_BACKEND_AUTOLOAD is 0), at the latest when ``weft.fused_ops`` is.
    """
    global _library
    if _library is not None:
        return
    library = torch.library.Library("symm_mem", "IMPL")
    with warnings.catch_warnings():
        # torch says once that a kernel replaces another one.
        warnings.filterwarnings("ignore", r"(?s).*previously registered kernel")
        for name, op in {**OPS, **EXCHANGES}.items():
            kernel, fake = matmul_on_weft(name) if name in OPS else exchange_on_weft(name)
            for key in DEVICES:
                library.impl(name, kernel, key, allow_override=True)
            # Inductor is told of the op, too, before it lowers one that its own pass put in.
            library.impl(name, compiled.known_to_inductor(fake), "Meta", allow_override=True)
            compiled.declare_communicating(op)
    torch.compiler.config.cache_key_tag += _TAG
    _library, Switch.on = library, True


def uninstall() -> None:
    """The ops are torch's again, also for graphs that are compiled already.

    >>> import weft
    >>> weft.drop_in.uninstall()
    >>> weft.drop_in.installed()
    False
    """
    global _library
    if _library is None:
        return
    library, _library, Switch.on = _library, None, False
    library._destroy()
    for op in (*OPS.values(), *EXCHANGES.values()):
        compiled.withdraw_communicating(op)
    tag = torch.compiler.config.cache_key_tag
    torch.compiler.config.cache_key_tag = tag.replace(_TAG, "")


def installed() -> bool:
    """Whether ``install()`` holds.

    >>> import weft
    >>> weft.drop_in.installed()
    False
    """
    return _library is not None


def installed_calls(*, clear: bool = False) -> tuple[CallsTaken, ...]:
    """Who took the calls of torch's ops in this process since ``install()``, and why.

    >>> import weft
    >>> for taken in weft.drop_in.installed_calls(clear=True):
    ...     print(taken)
    fused_all_gather_matmul: ... by weft...

    Args:
        clear: counts from 0 again.

    Returns:
        one entry for each op, taker and reason. A captured graph that is replayed counts once.
    """
    taken = tuple(CallsTaken(*key, count) for key, count in counts.items())
    if clear:
        counts.clear()
    return taken


def install_if_asked() -> None:
    """``install()`` if WEFT_INSTALL is 1.

    Raises:
        ValueError: it is neither 0 nor 1.
    """
    if is_on("WEFT_INSTALL"):
        install()
