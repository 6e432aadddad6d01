"""``out = all_gather(x)``: every rank sends its input to every rank."""

OP = "one_shot_all_gather"
TO_ROOT = "one_shot_gather"  #: which one rank alone receives
INTO = f"{OP}_out"
