"""put, get, signal and wait between registered tensors, in the order of a stream."""
