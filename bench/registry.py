"""What is measured: one row for each op, shape and mode."""

from __future__ import annotations

from dataclasses import dataclass

import torch

OPS = (
    "all_gather_matmul",
    "matmul_reduce_scatter",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "all_reduce",
    "all_reduce_rms_norm",
    "matmul_all_reduce",
)
#: Of fp8 operands, on request: a layer's name ends with how they are scaled.
SCALED_OPS = ("all_gather_scaled_matmul", "scaled_matmul_reduce_scatter")
#: Also on request: it has the kernel of all_reduce_rms_norm.
LAYER_NORM = "all_reduce_layer_norm"
SCALINGS = ("tensor", "rows", "blocks")
MODES = ("eager", "graph")

# K and N of the whole layer; a rank holds N / world of the first kind and K / world of the second.
LAYERS = {
    "all_gather_matmul": {
        "llama8b.qkv": (4096, 6144),
        "llama8b.q_k_v": (4096, 6144),
        "llama8b.upgate": (4096, 28672),
        "llama70b.qkv": (8192, 10240),
        "llama70b.upgate": (8192, 57344),
        "gpt3.fc1": (12288, 49152),
        # The last dimension is gathered: the heads' outputs, multiplied by columns of a weight instead of rows.
        "last.8b.o": (4096, 4096),
        "last.70b.o": (8192, 8192),
    },
    "matmul_reduce_scatter": {
        "llama8b.o": (4096, 4096),
        "llama8b.down": (14336, 4096),
        "llama70b.o": (8192, 8192),
        "llama70b.down": (28672, 8192),
        "gpt3.fc2": (49152, 12288),
        # The last dimension is scattered: columns of the result, as what follows wants whole rows of few columns.
        "last.8b.down": (14336, 4096),
        "last.70b.down": (28672, 8192),
    },
}
# Several matrices are multiplied by one gathered A: the shares of their columns.
SPLITS = {"llama8b.q_k_v": (4, 1, 1)}
LAST_DIMENSION = ("last.8b.o", "last.70b.o", "last.8b.down", "last.70b.down")
ON_REQUEST = LAST_DIMENSION  # only where --layers names them, by how they begin
LAYERS["matmul_all_reduce"] = {
    name: layer for name, layer in LAYERS["matmul_reduce_scatter"].items() if name not in LAST_DIMENSION
}
_SCALED_LAYERS = {
    "all_gather_scaled_matmul": ("all_gather_matmul", ("llama8b.qkv", "llama8b.upgate", "llama70b.upgate")),
    "scaled_matmul_reduce_scatter": (
        "matmul_reduce_scatter",
        ("llama8b.o", "llama8b.down", "llama70b.down"),
    ),
}
LAYERS |= {
    op: {f"{name}.{how}": LAYERS[unscaled][name] for name in names for how in SCALINGS}
    for op, (unscaled, names) in _SCALED_LAYERS.items()
}
M_SIZES = {"cuda": (512, 1024, 2048, 4096, 8192, 16384), "cpu": (32, 128)}
# Decoding, where nothing can be cut along the rows.
M_SIZES_ALL_REDUCE = {"cuda": (1, 16, 64, 256, 1024, 4096), "cpu": (1, 32)}
TOKENS = {"cuda": (1, 4, 16, 64, 128, 256, 512), "cpu": (1, 16)}
HIDDEN_SIZES = {"cuda": (4096, 6144, 8192), "cpu": (512,)}
# Every power of two; between them 3 / 4 of it, as rows of 6144 elements have.
KIB_SIZES = {
    "cuda": tuple(sorted({*(2**i for i in range(1, 17)), *(3 * 2**i for i in range(2, 12))})),
    "cpu": (2, 32, 256, 1024),
}
# Sizes are those of the whole tensor; some are measured again with the last dimension of so many rows cut.
ALONE = ("all_gather", "reduce_scatter", "all_to_all")
LAST_KIB_SIZES, LAST_ROWS = (256, 4096, 65536), 64
DTYPE = {"cuda": torch.bfloat16, "cpu": torch.float32}
CPU_SCALE = 16  # a layer's K and N are divided by this on the CPU


@dataclass(frozen=True)
class Row:
    """One line of the table. ``K`` is None without a product; collectives alone have [M, N] = [1, elements]."""

    op: str
    name: str
    M: int
    K: int | None
    N: int
    dtype: torch.dtype
    mode: str

    @property
    def id(self) -> str:
        return f"{self.op}-{self.name}-{self.M}x{self.N}-{self.mode}"


def _selected(name: str, layers: tuple[str, ...]) -> bool:
    if name in ON_REQUEST:
        return any(name.startswith(part) for part in layers)
    return not layers or any(part in name for part in layers)


def select_rows(
    device: str,
    ops: tuple[str, ...] = OPS,
    layers: tuple[str, ...] = (),
    m_sizes: tuple[int, ...] = (),
    kib_sizes: tuple[int, ...] = (),
    modes: tuple[str, ...] = (),
) -> list[Row]:
    """The rows of a run on ``device`` ("cuda" or "cpu"); an empty selection means all there are.

    Args:
        layers: parts of layers' names ("llama8b" or "qkv").
        m_sizes: rows of the whole left matrix.
        kib_sizes: sizes of the whole tensor of a collective alone, in KiB.

    Raises:
        ValueError: an op, layer or mode is unknown, or the device has no such mode.
    """
    known, every = MODES if device == "cuda" else ("eager",), (*OPS, LAYER_NORM, *SCALED_OPS)
    for what, given, allowed in (("ops", ops, every), ("modes", modes, known)):
        if unknown := sorted(set(given) - set(allowed)):
            raise ValueError(f"{what}: {unknown} is not among {allowed} on {device}")
    names = [name for op in LAYERS for name in LAYERS[op]]
    if unknown := [part for part in layers if not any(part in name for name in names)]:
        raise ValueError(f"layers: {unknown} is in none of {names}")
    scale = 1 if device == "cuda" else CPU_SCALE
    dtype = DTYPE[device]
    found: list[Row] = []
    shapes: list[tuple[str, int, int | None, int]]
    for op in (op for op in every if op in ops):
        if op == "all_reduce" or op in ALONE:
            sizes = kib_sizes or KIB_SIZES[device]
            shapes = [(op, 1, None, kib * 1024 // dtype.itemsize) for kib in sizes]
            if op in ALONE:
                shapes += [
                    (f"{op}.last", LAST_ROWS, None, kib * 1024 // dtype.itemsize // LAST_ROWS)
                    for kib in sizes
                    if kib in LAST_KIB_SIZES
                ]
        elif op in ("all_reduce_rms_norm", LAYER_NORM):
            shapes = [
                (op, m, None, hidden) for hidden in HIDDEN_SIZES[device] for m in m_sizes or TOKENS[device]
            ]
        else:
            rows = M_SIZES_ALL_REDUCE if op == "matmul_all_reduce" else M_SIZES
            shapes = [
                (name, m, k // scale, n // scale)
                for name, (k, n) in LAYERS[op].items()
                if _selected(name, layers)
                for m in m_sizes or rows[device]
            ]
        of_results = torch.bfloat16 if op in SCALED_OPS else dtype
        found += [Row(op, *shape, of_results, mode) for shape in shapes for mode in modes or known]
    return found
