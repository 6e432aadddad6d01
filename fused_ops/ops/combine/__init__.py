"""What experts' outputs add up to, reduced over the ranks: the end of a mixture's layer."""
