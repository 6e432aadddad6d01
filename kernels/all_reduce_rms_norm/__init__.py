"""``sums = residual + all_reduce(x)``, ``normed = rms_norm(sums) * weight``: one kernel."""
