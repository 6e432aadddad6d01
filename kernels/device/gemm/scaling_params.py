"""The host's side of scales.cuh."""

from __future__ import annotations

import ctypes


class ScalesParams(ctypes.Structure):
    """The twin of ``weft::Scales``."""

    _fields_ = (
        ("b", ctypes.c_uint64),
        ("bias", ctypes.c_uint64),
        ("b_block", ctypes.c_int32),
        ("b_column", ctypes.c_int32),
    )
