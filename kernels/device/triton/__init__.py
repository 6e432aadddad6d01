"""What Triton's kernels share: flags, tiles."""
