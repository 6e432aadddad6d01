"""Fallback graphs, pickled, and their runs."""
