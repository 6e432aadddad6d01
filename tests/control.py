"""Where a result is wrong: does this GPU multiply right at all? Asked of products that are torch's own."""

from __future__ import annotations

import torch


def own_products(device: torch.device, count: int = 400, rows: int = 2048) -> str:
    """How many of torch's products of small whole numbers are not whole, or others a second time, in words.

    Args:
        rows: and columns of each product, of a fourth of them in depth.
    """
    wrong = 0
    for i in range(count):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        a, b = (
            torch.randint(-9, 10, shape, device=device).div(9, rounding_mode="trunc").to(dtype)
            for shape in ((rows, rows // 4), (rows // 4, rows))
        )
        first, second = torch.mm(a, b), torch.mm(a, b)
        wrong += bool(((first != second) | (first.float() % 1 != 0)).any())
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "the CPU"
    return f"of {count} products of torch's own on {uuid} {wrong} are wrong"
