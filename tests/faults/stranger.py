"""A process that belongs to no group asks every socket of weft for memory. Run by test_strangers.py, without torch.

    python stranger.py SECONDS [UID]

Prints how many connections it made, and how many descriptors it was given.
"""

from __future__ import annotations

import os
import socket
import sys
import time


def names() -> list[str]:
    with open("/proc/net/unix") as f:
        return [line.split()[-1] for line in f if "@weft-" in line]


def ask(name: str, says: bytes) -> int:
    """How many descriptors a connection that says this is given."""
    with socket.socket(socket.AF_UNIX) as s:
        s.settimeout(0.5)
        s.connect("\0" + name[1:])
        s.sendall(says)
        _, fds, _, _ = socket.recv_fds(s, 1, 4)
        for fd in fds:
            os.close(fd)
        return len(fds)


def main() -> None:
    end = time.monotonic() + float(sys.argv[1])
    if len(sys.argv) > 2:
        os.setgid(int(sys.argv[2]))
        os.setuid(int(sys.argv[2]))
    asked = given = 0
    said = [b"x" * 64, b"", b"0" * 63, b'{"secret": null}' * 4, b"\x80\x04N." * 16]
    while time.monotonic() < end:
        for name in names():
            try:
                given += ask(name, said[asked % len(said)])
            except OSError:
                continue
            finally:
                asked += 1
        time.sleep(0.001)
    print(asked, given, flush=True)


if __name__ == "__main__":
    main()
