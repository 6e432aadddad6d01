"""From source to launch: NVRTC, Triton's launches, outputs."""
