"""``python -m weft``: what is here, and what weft does with it."""
