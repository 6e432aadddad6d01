"""What Triton kernels share: flags, tiles."""
