"""From source to launch: NVRTC, programs compiled ahead, outputs."""
