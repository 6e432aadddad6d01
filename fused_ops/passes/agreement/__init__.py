"""Ranks whose graphs differ: how they notice before a graph runs, and what runs instead."""
