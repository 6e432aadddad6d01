"""Any options of the pass: it can be used, or an error names the argument."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from weft.fused_ops import FusionPass

sys.path.insert(0, str(Path(__file__).parent))
import values as v


@v.SETTINGS
@given(st.one_of(v.junk, v.numbers, st.lists(st.one_of(v.junk, st.just("tp")), max_size=2)), st.booleans())
def test_any_groups(groups: Any, strict: bool) -> None:
    problem = ""
    try:
        fusion = FusionPass(groups=groups, strict=strict)
    except (TypeError, ValueError) as e:
        problem = str(e)
    else:
        assert isinstance(fusion.options, dict) and fusion.uuid() and not fusion.report().entries
    assert re.match("groups?: |$", problem), f"names no argument: {problem}"
