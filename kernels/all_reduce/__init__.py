"""``out = all_reduce(x)``: every rank sends its input to every rank, and each sums them all."""
