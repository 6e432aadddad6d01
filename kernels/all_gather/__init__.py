"""``out = all_gather(x)``: every rank sends its input to every rank."""

OP = "one_shot_all_gather"
INTO = f"{OP}_out"
