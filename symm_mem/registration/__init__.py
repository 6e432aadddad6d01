"""Peers for ordinary tensors: segments that ranks map or copy from, semaphores, put and get."""
