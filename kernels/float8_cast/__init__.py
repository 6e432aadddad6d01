"""Casts to fp8: by one scale a tensor, of its largest number on all ranks."""
