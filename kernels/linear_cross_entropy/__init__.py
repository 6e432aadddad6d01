"""Cross entropy, log-probabilities and entropy of ``x @ weight.t()`` whose columns the ranks share."""
