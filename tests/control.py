"""Where a result is wrong: does this GPU multiply right at all? Asked of products that are torch's own."""

from __future__ import annotations

import torch


def own_products(device: torch.device, count: int = 400) -> str:
    """How many of torch's products of small whole numbers are not whole, or others a second time, in words."""
    wrong = 0
    for i in range(count):
        dtype = (torch.bfloat16, torch.float16)[i % 2]
        a, b = (
            torch.randint(-9, 10, shape, device=device).div(9, rounding_mode="trunc").to(dtype)
            for shape in ((2048, 512), (512, 2048))
        )
        first, second = torch.mm(a, b), torch.mm(a, b)
        wrong += bool(((first != second) | (first.float() % 1 != 0)).any())
    uuid = torch.cuda.get_device_properties(device).uuid if device.type == "cuda" else "the CPU"
    return f"of {count} products of torch's own on {uuid} {wrong} are wrong"
