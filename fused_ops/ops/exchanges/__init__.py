"""Ops that exchange parts of two dimensions, alone and around a product."""
