"""Inline assembly: barriers, wgmma, tcgen05, TMA, loads and stores with scope and order."""
