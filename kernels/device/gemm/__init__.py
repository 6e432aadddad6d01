"""The matmul's main loop, tiles, tensor maps and their model."""
