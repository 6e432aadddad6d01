"""Programs that send what they have computed, and use memory again before they wait for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from spelled import ag, rs
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.utils import run_and_get_code
from weft.fused_ops import FusionPass

WIDTH = 512


def scaled(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    z = (x @ m) @ v
    full = ag(a * 1.5)
    return full[:WIDTH] * z + full[WIDTH:]


def cast(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """Of a transposed shard, used again after the gather."""
    z = (x @ m) @ v
    b = a.t().bfloat16().contiguous()
    full = ag(b).float()
    return full[:WIDTH] * z + full[WIDTH:] + b


def sliced(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """A view of what is computed."""
    half = (a @ m)[WIDTH // 2 :]
    z = (x @ m) @ v
    return ag(half) * z


def reduced(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    z = (x @ m) @ v
    part = rs(a * 1.5)
    return part * z[: len(part)] + z[len(part) :]


def read_late(x: Tensor, m: Tensor, v: Tensor, a: Tensor) -> Tensor:
    """What reads a weight is fused into what follows much later."""
    whole = ag(a)
    scale = whole[:WIDTH] * 2 - whole[WIDTH:]
    z = ((x @ m) @ v) @ x
    return scale * z + 1


PROGRAMS = (scaled, cast, sliced, reduced, read_late)


def right(rank: int, fn: Callable[..., Tensor], settings: dict[str, Any]) -> str:
    """Compares what it gives with eager mode on fresh data, three times; gives the code."""
    torch._dynamo.reset()
    program = torch.compile(fn, options=FusionPass(reorder=True).options)
    generator = torch.Generator(torch.get_default_device()).manual_seed(rank)
    with torch.no_grad(), inductor_config.patch(fx_graph_cache=False, **settings):
        for turn in range(3):
            given = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(4)]
            want = fn(*given)
            if turn == 0:
                y, (code,) = run_and_get_code(program, *given)
            else:
                y = program(*given)
            # Products of either may be rounded to 10 bits, and terms of a sum to 7.
            torch.testing.assert_close(y.double(), want.double(), rtol=2e-2, atol=2e-2)
    return str(code)


def check_code(code: str) -> None:
    """One buffer for a start and its wait; what is gathered in place is not read after its release."""
    starts = re.findall(r"(\w+) = torch\.ops\.weft\.\w+_start\.default\((.+?), '", code)
    waits = re.findall(r"torch\.ops\.weft\.\w+_wait\.default\((\w+), (.+?), '", code)
    assert starts and sorted(starts) == sorted(waits), code
    for release in re.finditer(r"all_gather_release\.default\(\w+, (\w+)", code):
        after = code[release.end() :].split("return (")[0].split("\n")[1:]
        kernels = [line for line in after if not line.lstrip().startswith(("del", "#", "weft_watch"))]
        read = [line for line in kernels if re.search(rf"\b{release[1]}\b", line.split("weft_watch")[0])]
        assert all(line.lstrip().startswith(f"{release[1]} = ") for line in read), code
