"""Scaled products of fp8 operands, beside collectives."""
