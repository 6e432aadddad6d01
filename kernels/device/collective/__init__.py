"""Stand-alone collectives: a rank's part of a tensor in any dimension, several epochs in one launch, and their launcher."""
