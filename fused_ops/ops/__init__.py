"""One file an op: from the op's tensors to a kernel's, and back."""
