"""``out = reduce_scatter(x)``: every rank sends each rank its part, and each sums what it gets."""

OP = "one_shot_reduce_scatter"
INTO = f"{OP}_out"
