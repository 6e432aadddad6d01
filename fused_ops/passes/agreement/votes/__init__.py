"""The board of a group, where its ranks vote, and what they run ahead of each other."""
