"""The order of collectives and of what runs beside them."""
