"""Late, diverging and dead ranks: deadlines, the call check, poison on error."""
