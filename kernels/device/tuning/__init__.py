"""Which configuration runs: choices, by predicted times."""
