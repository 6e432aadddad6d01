"""weft draws communication through the matrix product: ``from weft.fused_ops import ...``.

This file imports nothing on purpose: pytest would otherwise import the checkout a second time under
its folder's name, and heaps and caches would exist twice.
"""
