"""Fallback graphs as text, and their runs."""
