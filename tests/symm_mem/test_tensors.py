"""What ``rendezvous`` makes of tensors that are not as ``empty`` gave them."""

from __future__ import annotations

import pytest
import torch
from ranks import on_ranks
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap


@on_ranks(2)
def test_a_tensor_that_torch_has_moved_is_refused(rank: int, world_size: int) -> None:
    with pytest.raises(ValueError, match="tensor: does not lie on a heap"):
        symm_mem.rendezvous(symm_mem.empty(100).share_memory_())
    symm_mem.rendezvous(symm_mem.empty(0)).barrier()


@on_ranks(2)
def test_peers_of_conjugated_and_negated_views_are_so_too(rank: int, world_size: int) -> None:
    x = symm_mem.empty(3, dtype=torch.complex64).fill_(complex(rank, rank + 1))
    peers = symm_mem.rendezvous(x)
    peers.barrier()
    conjugated, negated = (symm_mem.rendezvous(view).tensors for view in (x.conj(), x.conj().imag))
    for source in range(world_size):
        assert conjugated[source].tolist() == 3 * [complex(source, -source - 1)]
        assert negated[source].tolist() == 3 * [-source - 1]
    peers.barrier()


@on_ranks(2)
def test_the_cpu_may_have_a_number(rank: int, world_size: int) -> None:
    x = symm_mem.empty(3, device="cpu:0")
    assert get_heap(device="cpu:0") is get_heap(device="cpu") and x.device == torch.device("cpu")
    symm_mem.rendezvous(x).barrier()
