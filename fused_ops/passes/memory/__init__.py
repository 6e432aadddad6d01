"""What a graph's values need of memory: which of them share it, and when it is made and freed."""
