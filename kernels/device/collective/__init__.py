"""Stand-alone collectives: parts of a tensor in any dimension, and several epochs in one launch."""
