"""Collectives that run beside what follows them, by copy engines: what the pass puts where no product takes one."""

from . import registration as registration
