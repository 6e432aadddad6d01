"""Where the tokens of a mixture of experts go."""
