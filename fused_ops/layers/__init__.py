"""Tensor-parallel layers over the ops."""
