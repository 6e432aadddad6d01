"""The board of a group, where its ranks vote, and the graphs that they know."""
