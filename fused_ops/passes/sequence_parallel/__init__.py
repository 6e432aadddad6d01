"""All-reduces, and what follows them row by row, put on each rank's own rows."""
