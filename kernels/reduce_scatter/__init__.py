"""``out = reduce_scatter(x)``: every rank sends each rank its part, and each sums what it gets."""
