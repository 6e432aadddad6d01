"""``grouped_matmul`` beside ``torch._grouped_mm`` on one GPU, in CUDA graphs: on rows that are in their order, and with
those that are taken by index, which torch takes before its product.

    python bench/grouped_matmul.py --seconds 60
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from weft.fused_ops import grouped_matmul, moe_route

# Hidden, an expert's width, experts, and choices of a token; between two ranks that slice experts.
MODELS = {
    "Qwen3-30B": (2048, 768, 128, 8),
    "GPT-OSS-20B": (2880, 2880, 32, 4),
    "Mixtral": (4096, 14336, 8, 2),
    "Qwen3-235B": (4096, 1536, 128, 8),
    "DeepSeek-V3": (7168, 2048, 256, 8),
}
TOKENS = (64, 512, 2048, 8192, 16384)
_BOUND = 5e-3  # of the difference between the products, by their norm: each is rounded to bfloat16


def fastest_us(call: Callable[[], Any], times: int) -> float:
    """Microseconds of a call: the fastest of four replays of a graph of so many."""
    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(times):
            call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    found = []
    for _ in range(4):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 1000 / times)
    return min(found)


def row(tokens: int, shape: tuple[int, int, int], choices: int) -> dict[str, float]:
    """Of experts [E, K, N], in microseconds."""
    experts, k, n = shape
    B = torch.empty(experts, n, k, device="cuda", dtype=torch.bfloat16).normal_(0, k**-0.5).mT
    A = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    ids = torch.rand(tokens, experts, device="cuda").topk(choices, dim=1)[1]
    rows, offs, _ = moe_route(ids, experts)
    taken = A[rows.long()]
    want = torch._grouped_mm(taken, B, offs).float()
    for got in (grouped_matmul(taken, B, offs), grouped_matmul(A, B, offs, rows=rows)):
        assert (got.float() - want).norm() < _BOUND * want.norm(), "wrong"
    calls: dict[str, Callable[[], Any]] = {
        "torch": lambda: torch._grouped_mm(taken, B, offs),
        "weft": lambda: grouped_matmul(taken, B, offs),
        "torch by index": lambda: torch._grouped_mm(torch.index_select(A, 0, rows), B, offs),
        "weft by index": lambda: grouped_matmul(A, B, offs, rows=rows),
    }
    return {name: fastest_us(call, 10 if tokens <= 512 else 3) for name, call in calls.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no row after so many")
    args = parser.parse_args()
    begin, ratios = time.monotonic(), list[tuple[float, float]]()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16, microseconds")
    for tokens in TOKENS:
        for model, (hidden, width, experts, choices) in MODELS.items():
            for product, k, n in (("gate and up", hidden, width), ("down", width // 2, hidden)):
                if time.monotonic() - begin > args.seconds:
                    break
                us = row(tokens, (experts, k, n), choices)
                pair = us["torch"] / us["weft"], us["torch by index"] / us["weft by index"]
                ratios.append(pair)
                times = ", ".join(f"{name} {each:.1f}" for name, each in us.items())
                print(f"{model} {product} M = {tokens}: {times}; {pair[0]:.2f} {pair[1]:.2f}", flush=True)
    for name, found in zip(("in order", "by index"), zip(*ratios, strict=True), strict=True):
        mean = math.exp(sum(map(math.log, found)) / len(found))
        print(
            f"{name}: {mean:.3f} times torch's speed in the geometric mean of {len(found)}, least {min(found):.2f}"
        )


if __name__ == "__main__":
    main()
