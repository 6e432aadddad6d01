"""What NVML says of GPUs that CUDA_VISIBLE_DEVICES hides from this process, of which CUDA says nothing."""

from __future__ import annotations

import ctypes
from uuid import UUID

_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


def are_joined_by_nvlink(gpu: str, other: str) -> bool:
    """Whether NVLink joins two GPUs of this host, named by the hexadecimal digits of their UUIDs; False where NVML
    does not know it."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    if nvml.nvmlInit_v2() != 0:
        return False
    try:
        handles = ctypes.c_void_p(), ctypes.c_void_p()
        for uuid, handle in zip((gpu, other), handles, strict=True):
            if nvml.nvmlDeviceGetHandleByUUID(f"GPU-{UUID(uuid)}".encode(), ctypes.byref(handle)) != 0:
                return False
        status = ctypes.c_int()
        said = nvml.nvmlDeviceGetP2PStatus(*handles, _NVLINK, ctypes.byref(status))
        return said == 0 and status.value == 0
    finally:
        nvml.nvmlShutdown()
