"""put, get, signal and wait of registered tensors, in torch.ops.weft."""
