"""``out = all_reduce(x)``: every rank sends its input to every rank, and each sums them all."""

OP = "one_shot_all_reduce"
IN_PLACE = f"{OP}_"
