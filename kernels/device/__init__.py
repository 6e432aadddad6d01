"""What kernels share: flags and fences, tile order, and the build and launch of CUDA C++."""
