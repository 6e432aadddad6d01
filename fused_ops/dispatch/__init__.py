"""Which algorithm runs a call, in which workspace, in which order on streams."""
