"""Norms after an all-reduce, as the pass finds them and hands them to the op that computes both."""
