"""Tokens to the ranks of their experts, and back: each token once to each rank that has one of its experts."""

OP = "moe_dispatch"
BACK = "moe_combine"
