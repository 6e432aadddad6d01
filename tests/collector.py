"""The server that ranks are forked from imports this first: of what its imports make nothing is garbage."""

import gc

gc.disable()
