"""Collectives on copy engines, concurrent with what follows them; the pass inserts them where no matmul fuses one."""

from . import registration as registration
