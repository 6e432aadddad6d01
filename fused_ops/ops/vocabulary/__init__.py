"""Cross entropy and log-probabilities of logits whose columns the ranks share."""
