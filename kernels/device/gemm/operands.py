"""Which factors of a product the kernels take: dtypes, strides and addresses, by which TMA loads them."""

from __future__ import annotations

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ALIGNMENT = 16  # bytes: what a descriptor asks of addresses and of all strides but the last
_MOST_STRIDE = 1 << 40  # bytes


def is_transposed(b: torch.Tensor) -> bool:
    """Whether a [K, N] matrix lies in memory as [N, K]: the weight of a Linear layer, transposed."""
    return b.stride(0) == 1 and b.stride(1) != 1


def why_not(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """Why ``a @ b`` cannot be fed to a kernel through descriptors; None if it can.

    Args:
        a: [..., K], at most 4-D, the last dimension contiguous.
        b: [K, N], rows or columns contiguous.
    """
    if a.dtype not in DTYPES:
        return f"dtype: is {a.dtype}, must be one of {', '.join(map(str, DTYPES))}"
    if b.dtype != a.dtype:
        return f"dtype: A has {a.dtype} and B has {b.dtype}, must be the same"
    if a.numel() == 0 or b.numel() == 0:
        return f"shape: A {tuple(a.shape)} and B {tuple(b.shape)}, must not be empty"
    k, n = b.shape
    for name, size in (("K", k), ("N", n)):
        if size * a.dtype.itemsize % ALIGNMENT:
            return f"{name}: rows of {size} x {a.dtype} must be a multiple of {ALIGNMENT} bytes"
    rows = b.t() if is_transposed(b) else b
    for name, matrix in (("A", a), ("B", rows)):
        if problem := _why_not_rows(matrix):
            return f"{name}: {problem}"
    return None


def _why_not_rows(x: torch.Tensor) -> str | None:
    if x.stride(-1) != 1:
        return f"strides {x.stride()}, one dimension must be contiguous"
    if not rows_lie_well(x):
        return f"strides {x.stride()}, must be positive multiples of {ALIGNMENT} bytes but for the last"
    if after := start_of(x) % ALIGNMENT:
        return f"starts {after} bytes after a multiple of {ALIGNMENT}"
    return None


def rows_lie_well(x: torch.Tensor) -> bool:
    """Whether all strides but the last are such as descriptors take."""
    steps = [n * x.dtype.itemsize for size, n in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
    return all(0 < step < _MOST_STRIDE and step % ALIGNMENT == 0 for step in steps)


def start_of(x: torch.Tensor) -> int:
    """Where x begins; that of a tensor without data is counted from its storage, which is aligned."""
    fake = isinstance(x, torch._subclasses.FakeTensor) or x.device.type == "meta"
    return int(x.storage_offset()) * x.dtype.itemsize if fake else x.data_ptr()
