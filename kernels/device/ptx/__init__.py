"""Inline assembly: barriers, wgmma, TMA, loads and stores with scope and order."""
