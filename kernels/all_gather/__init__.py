"""``out = all_gather(x)``: every rank sends its input to every rank."""
