"""``out = all_to_all(x)``: every rank sends each rank a part of its input."""

OP = "one_shot_all_to_all"
