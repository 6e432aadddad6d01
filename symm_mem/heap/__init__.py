"""The heap: one address range for all ranks of a group."""
