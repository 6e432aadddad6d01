"""The tile of a grouped product beside all that were timed on an H200."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from statistics import geometric_mean

import weft
from weft.kernels.grouped_matmul.configs import choose_grouped

RESULTS = Path(weft.__file__).parent / "bench" / "results" / "h200-x1-grouped-matmul.txt"
# Hidden, an expert's width, experts, and choices of a token.
MODELS = {
    "qwen30b": (2048, 768, 128, 8),
    "gptoss20b": (2880, 2880, 32, 4),
    "mixtral": (4096, 14336, 8, 2),
    "qwen235b": (4096, 1536, 128, 8),
    "deepseek": (7168, 2048, 256, 8),
}


def test_the_tile_is_among_the_fastest() -> None:
    slower = []
    for model, product, tokens, times in re.findall(
        r"^(\w+) ([12]) (\d+) (\{.*\})$", RESULTS.read_text(), re.M
    ):
        hidden, width, experts, choices = MODELS[model]
        k, n = (hidden, width) if product == "1" else (width // 2, hidden)
        tile = choose_grouped(int(tokens) * choices, experts, [n], k, 132).tile
        us = ast.literal_eval(times)
        slower.append(us[f"{tile.block_m}x{tile.block_n}"] / min(us.values()))
    assert len(slower) == 48 and max(slower) < 1.1 and geometric_mean(slower) < 1.02


def test_several_bs_are_chosen_for_together() -> None:
    """Columns of two B of 384 are those of one of 768 where a tile divides both."""
    assert choose_grouped(512, 128, [384, 384], 2048, 132) == choose_grouped(512, 128, [768], 2048, 132)
