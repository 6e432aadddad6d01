"""Imported first, by the server that ranks are forked from and by small programs: of what imports make nothing is
garbage."""

import gc

gc.disable()
