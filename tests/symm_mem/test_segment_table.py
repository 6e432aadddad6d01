"""The table of segments: which unused ones it keeps, how many, and what it knows of one that comes back."""

from __future__ import annotations

import gc
import weakref

import pytest
from weft.symm_mem.registration import segments

MIB = 1 << 20


def segment(kind: str, name: str, base: int = MIB, size: int = MIB) -> segments.Segment:
    return segments.Segment(kind, name, base, size)


def used(
    table: segments.SegmentTable, s: segments.Segment
) -> tuple[segments.SegmentKey, weakref.ref[segments.Mapping]]:
    mapping = segments.Mapping(7 * MIB, None, s.size)
    table.use((1, s.key), s, lambda: segments.KnownSegment(1, s, mapping))
    return (1, s.key), weakref.ref(mapping)


@pytest.mark.parametrize("kind", segments.KINDS)
def test_what_is_kept_unused(kind: str) -> None:
    table = segments.SegmentTable()
    key, mapping = used(table, segment(kind, "a"))
    table.use(key, segment(kind, "a"), lambda: pytest.fail("it is mapped already"))
    table.give_back([key])
    assert key in table and table.bytes == MIB, "there is another registration"
    table.give_back([key])
    gc.collect()
    assert (key in table) is (mapping() is not None) is (kind in segments.LASTING)
    assert table.bytes == (MIB if kind in segments.LASTING else 0)
    assert "ipc" not in segments.LASTING and "process" not in segments.LASTING


@pytest.mark.parametrize("kind", segments.LASTING)
def test_the_cache_is_bounded(kind: str) -> None:
    table = segments.SegmentTable()
    keys = [used(table, segment(kind, str(i)))[0] for i in range(segments.UNUSED + 5)]
    table.give_back(keys)
    assert len(table) == segments.UNUSED and keys[5] in table and keys[4] not in table, (
        "the least recently used go first"
    )
    table.use(keys[5], segment(kind, "5"), lambda: pytest.fail("it is mapped already"))
    large, _ = used(table, segment(kind, "large", size=segments.UNUSED_BYTES + 1))
    table.give_back([large])
    assert len(table) == 1 and keys[5] in table, "larger than the cache: nothing unused is left"


def test_a_segment_that_comes_back_elsewhere_is_known_where_it_lies() -> None:
    table = segments.SegmentTable()
    key, _ = used(table, segment("vmm", "h", base=4 * MIB))
    table.give_back([key])
    assert table.holding(1, "vmm", 4 * MIB, 1) is None, "nobody uses it, so it may be gone"
    table.use(key, segment("vmm", "h", base=9 * MIB), lambda: pytest.fail("it is mapped already"))
    assert table.holding(1, "vmm", 4 * MIB, 1) is None
    assert table.holding(1, "vmm", 9 * MIB, 1) == segment("vmm", "h", base=9 * MIB)
