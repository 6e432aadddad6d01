"""Reading and rewriting FX graphs."""
