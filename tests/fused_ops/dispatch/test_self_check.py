"""The check of a heap on GPUs that no kernel was run on: between CPU ranks, which run the same steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from opcommon import world
from ranks import run_ranks
from weft.fused_ops import self_check
from weft.kernels.all_reduce.configs import choose_all_reduce
from weft.kernels.device import capability
from weft.symm_mem import HeapUnavailable, WeftError
from weft.symm_mem.heap import registry
from weft.symm_mem.heap.heap import Heap
from weft.symm_mem.heap.registry import known_heap_of

#: And the op whose results are wrong.
CHECKS = {
    "all_reduce": "one_shot_all_reduce",
    "all_gather": "one_shot_all_gather",
    "reduce_scatter": "one_shot_reduce_scatter",
    "norm": "fused_all_reduce_rms_norm",
    "gathered_products": "fused_all_gather_matmul",
    "scattered_products": "fused_matmul_reduce_scatter",
}


def passes(rank: int, size: int) -> None:
    heap = Heap(world(), torch.device("cpu"))
    self_check.run_checks(heap)
    assert known_heap_of(None, "cpu") is None, "it is asked for while the heap is made"


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_reach_each_other_pass(size: int) -> None:
    run_ranks(passes, size, fresh=True)


def test_both_forms_of_all_reduces_are_checked() -> None:
    for size in range(2, 9):
        counts = self_check._SMALL, self_check._LARGE
        assert [choose_all_reduce(2 * n, size).form for n in counts] == ["one_shot", "two_shot"]


def fails(rank: int, size: int) -> list[str]:
    said = []
    heap: Any = Heap(world(), torch.device("cpu"))
    if rank == 1:  # whose stores to rank 0 do not arrive
        there = heap.tensor
        heap.tensor = lambda of, *how: there(of, *how).clone() if of == 0 else there(of, *how)
    with pytest.raises(WeftError) as error:
        self_check.run_checks(heap)
    said.append(str(error.value))
    run = self_check._run
    for check in CHECKS:
        heap = Heap(world(), torch.device("cpu"))

        def wrong(heap: Heap, name: str, *arguments: object, check: str = check) -> list[torch.Tensor]:
            results = run(heap, name, *arguments)
            if rank == 1 and name == CHECKS[check]:
                results[0].view(-1)[-1] += 1
            return results

        self_check._run = wrong
        with pytest.raises(WeftError) as error:
            self_check.run_checks(heap)
        said.append(str(error.value))
    self_check._run = run
    return said


def test_what_is_wrong_on_one_rank_all_are_told() -> None:
    first, other = run_ranks(fails, 2, fresh=True)
    assert first == other
    patterns, *checks = first
    assert "read patterns" in patterns and "memory of rank 0 has not what rank 1 wrote there" in patterns
    for check, said in zip(CHECKS, checks, strict=True):
        assert f"check {check} in group" in said and "rank 1: " in said and "1 of " in said


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Has GPUs that are not there be such as WEFT_ARCH names; else they are Hoppers."""

    def set_arch(arch: str) -> None:
        monkeypatch.setenv("WEFT_ARCH", arch)
        capability.simulated_capability.cache_clear()

    monkeypatch.delenv("WEFT_ARCH", raising=False)
    capability.simulated_capability.cache_clear()
    yield set_arch
    capability.simulated_capability.cache_clear()
    self_check._warned.clear()


def test_when_it_is_made(
    use: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nvlink, pcie = (SimpleNamespace(over_pcie=over) for over in (False, True))
    on_gpu, on_cpu, alone = (
        SimpleNamespace(device=torch.device(kind), backend=nvlink, world_size=ranks)
        for kind, ranks in (("cuda", 2), ("cpu", 2), ("cuda", 1))
    )
    checked: list[Any] = []
    monkeypatch.setattr(self_check, "run_checks", checked.append)
    use("80")
    self_check.check_new_heap(on_gpu)  # type: ignore[arg-type]
    assert checked == [] and not caplog.records
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    with caplog.at_level(logging.WARNING):
        for heap in (on_gpu, on_cpu, alone, on_gpu):
            self_check.check_new_heap(heap)  # type: ignore[arg-type]
    assert checked == [on_gpu] * 2 and len(caplog.records) == 1
    assert "never run on compute_80: each group's first heap is checked" in caplog.text
    monkeypatch.delenv("WEFT_ARCH")
    capability.simulated_capability.cache_clear()
    self_check.check_new_heap(on_gpu)  # type: ignore[arg-type]
    assert len(checked) == 2
    monkeypatch.delenv("WEFT_UNTESTED")  # Hoppers over PCIe are checked whatever it says
    with caplog.at_level(logging.WARNING):
        self_check.check_new_heap(SimpleNamespace(device=on_gpu.device, backend=pcie, world_size=2))  # type: ignore[arg-type]
    assert len(checked) == 3 and "never run over PCIe: each group's" in caplog.text


@pytest.mark.parametrize("arch", ["89", None])
def test_a_heap_is_checked_as_it_is_made(
    use: Callable[[str], None], monkeypatch: pytest.MonkeyPatch, arch: str | None
) -> None:
    def allocate(size: int, tag: str) -> None:
        raise WeftError(f"nothing for the {tag}")

    links = SimpleNamespace(over_pcie=False)
    made = SimpleNamespace(
        device=torch.device("cuda"), world_size=2, rank=0, allocate=allocate, backend=links
    )
    monkeypatch.setattr(registry, "Heap", lambda group, device: made)
    group: Any = SimpleNamespace(
        name=lambda: "nccl", group_name="0", _get_backend=lambda device: SimpleNamespace(name=lambda: "nccl")
    )
    if arch is not None:
        use(arch)
    assert registry._make(group, made.device) is made
    monkeypatch.setenv("WEFT_UNTESTED", "1")
    found = registry._make(group, made.device)
    if arch is None:  # a Hopper
        assert found is made
    else:
        assert isinstance(found, HeapUnavailable)
        assert "never run on compute_89 failed their check: nothing for the check of peer access" in str(
            found
        )
    monkeypatch.delenv("WEFT_UNTESTED")
    links.over_pcie = True
    assert "never run over PCIe failed their check" in str(registry._make(group, made.device))
