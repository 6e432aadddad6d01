"""What the calls of a graph will run, and its kernels, compiled before the graph runs."""
