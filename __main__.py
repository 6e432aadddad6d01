"""``python -m weft``: what is here, and what weft does with it."""

import sys

from weft.fused_ops.about.command import command_line

if __name__ == "__main__":
    sys.exit(command_line(sys.argv[1:]))
