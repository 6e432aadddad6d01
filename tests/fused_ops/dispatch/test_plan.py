"""What a call decides before it runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from weft import fused_ops
from weft.fused_ops.dispatch import plan, staging


def test_aligned_copies_only_what_lies_badly() -> None:
    base = torch.randn(65)
    well = base[:64].view(8, 8).t()
    assert staging.aligned(well) is well
    badly = base[1:].view(8, 8).t()
    copy = staging.aligned(badly)
    assert copy.data_ptr() % 16 == 0 and copy.stride() == badly.stride()
    assert torch.equal(copy, badly)


@pytest.mark.parametrize(("text", "left"), [(None, 132), ("0", 132), ("32", 100)])
def test_reserved_sms(monkeypatch: pytest.MonkeyPatch, text: str | None, left: int) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    plan.num_sms.cache_clear()
    if text is not None:
        monkeypatch.setenv("WEFT_RESERVED_SMS", text)
    assert plan.num_sms(torch.device("cuda", 0)) == left
    plan.num_sms.cache_clear()


@pytest.mark.parametrize("text", ["132", "-1", "some"])
def test_a_reserve_that_makes_no_sense_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(multi_processor_count=132)
    )
    plan.num_sms.cache_clear()
    monkeypatch.setenv("WEFT_RESERVED_SMS", text)
    with pytest.raises(ValueError, match=f"WEFT_RESERVED_SMS: is '{text}', must be a number from 0 to 130"):
        plan.num_sms(torch.device("cuda", 0))


def test_an_algorithm_can_be_asked_for() -> None:
    assert not plan.should_fuse(False) and plan.should_fuse(True)
    with plan.forced("fused"):
        assert plan.should_fuse(False)
        with plan.forced("unfused"):
            assert not plan.should_fuse(False)
        assert plan.should_fuse(False)
    with plan.forced("one_shot"):
        assert plan.should_fuse(False) and plan.preferred_kernel() == "one_shot"
        with plan.forced("fused"):
            assert plan.should_fuse(False) and plan.preferred_kernel() is None
        assert plan.preferred_kernel() == "one_shot"
    assert plan.preferred_kernel() is None and not plan.should_fuse(False)
    with pytest.raises(ValueError, match="algorithm: is 'fast'"), plan.forced("fast"):
        pass


def in_a_thread(body: Callable[[], None]) -> None:
    failed: list[BaseException] = []

    def run() -> None:
        try:
            body()
        except BaseException as e:
            failed.append(e)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and not failed, failed


def test_the_last_plan_is_that_of_this_threads_last_call() -> None:
    mine, theirs = plan.Plan("push"), plan.Plan("host")
    plan.ran(mine)

    def other() -> None:
        assert plan.last_plan().algorithm == "none", "it has made no call"
        plan.ran(theirs)
        assert plan.last_plan() is theirs

    in_a_thread(other)
    assert plan.last_plan() is mine


def test_what_is_asked_for_holds_in_all_threads_and_ends_with_its_body() -> None:
    """Bodies of several threads may end in any order; none outlives them."""
    first, second = plan.forced("fused"), plan.forced("unfused")

    def other() -> None:
        assert plan.should_fuse(False)
        second.__enter__()

    first.__enter__()
    in_a_thread(other)
    assert not plan.should_fuse(False)
    first.__exit__(None, None, None)
    assert plan._forced == "unfused", "the other thread is in its body yet"
    in_a_thread(lambda: second.__exit__(None, None, None) and None)
    assert plan._forced is None and not plan.should_fuse(False)


def planned() -> Iterator[tuple[str, plan.Plan]]:
    """The algorithm that is expected, and the plan."""
    of, BF16, F32 = fused_ops.plan, torch.bfloat16, torch.float32

    def x(on: str, *shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
        return torch.empty(*shape, device=on, dtype=dtype)

    for on, counts, wanted in (
        ("cpu", [3, 2], "host"),
        ("cuda", [3, 2], "unfused"),
        ("cuda", [2, 2], "push"),
    ):
        part, whole = x(on, counts[0], 64), x(on, sum(counts), 64)
        yield wanted, of(fused_ops.one_shot_all_gather, part, 0, counts=counts)
        yield wanted, of(fused_ops.one_shot_reduce_scatter, whole, "sum", 0, counts=counts)
        yield wanted, of(fused_ops.one_shot_gather, part, 0, 1, counts=None if wanted == "push" else counts)
    sizes = (
        (64, 64, "host"),
        (4096, 75968, "copy_engine"),
        (16, 75968, "one_shot"),
        (2048, 1024, "one_shot"),
    )
    for rows, n, wanted in sizes:
        on = "cpu" if wanted == "host" else "cuda"
        yield wanted, of(fused_ops.fused_matmul_all_gather, x(on, rows, 4096), x(on, 4096, n))
    kinds = ((64, F32, "host"), (8192, BF16, "push"), (16, BF16, "one_shot"), (8192, F32, "one_shot"))
    for rows, dtype, wanted in kinds:
        A, B, C = (x("cpu" if wanted == "host" else "cuda", n, 4096, dtype=dtype) for n in (rows, 4096, 8192))
        yield wanted, of(fused_ops.fused_matmul_all_to_all, A, B, 0)
        yield wanted, of(fused_ops.fused_all_to_all_matmul, A, C, 0)


def test_which_algorithm_runs(two: str) -> None:
    with torch._subclasses.FakeTensorMode():
        for wanted, found in planned():
            assert found.algorithm == wanted, found
            assert (found.workspace_bytes > 0) == (wanted != "unfused")
            assert ("different counts" in found.reason) == (wanted == "unfused")
