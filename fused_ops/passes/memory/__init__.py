"""What a graph's values need of memory: which of them share it, when it is made and freed, and whether that is true."""
