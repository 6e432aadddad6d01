"""Which configuration runs: choices, measured or predicted."""
