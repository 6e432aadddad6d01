"""What torch.library is told of the ops: schemas, fakes, validation, gradients, FLOPs."""
