"""CPU ranks: the names of the ops; every rank sends its input to every rank (device/collective/host_exchange.py)."""

OP = "one_shot_all_gather"
INTO = f"{OP}_out"
