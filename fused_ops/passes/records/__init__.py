"""What the pass did with a graph, kept with its code: for the report of who takes it from Inductor's cache."""
