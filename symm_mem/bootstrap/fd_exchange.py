"""Ranks hand each other file descriptors.

They travel over Unix sockets (SCM_RIGHTS): to processes of the same user alone, and only to those that know the
group's secret, which stands in the store. The sockets' names are random and abstract, and each lives for one exchange,
so nothing is left on the file system however a process ends. What is received is compared, never interpreted.
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from ..errors import WeftError, describe
from ..timeouts import get_timeout
from .rendezvous import Rendezvous

_SLICE = 0.1  # seconds: how often a giver looks whether it is still wanted
_STRANGER = 2.0  # seconds that whoever connects may take to show the secret


def exchange(rendezvous: Rendezvous, fd: int, secret: str) -> list[int]:
    """Give every rank ``fd`` and get theirs. The entry of this rank is ``fd`` itself; close the others. Collective.

    Raises:
        PeerTimeout: a rank did not come.
        WeftError: on every rank, when a descriptor could not be handed over.
    """
    if rendezvous.world_size == 1:
        return [fd]
    server: socket.socket | None = None
    name, problem = f"weft-{secrets.token_hex(16)}", None
    try:
        try:
            server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            server.bind(f"\0{name}".encode())
            server.listen(2 * rendezvous.world_size)
        except OSError as e:
            problem = describe(e)
        posts = rendezvous.gather("hand out memory", [name, problem])
        rendezvous.refuse("hand out memory", [post[1] for post in posts])
        assert server is not None
        return _exchange(rendezvous, server, [post[0] for post in posts], fd, secret)
    finally:
        if server is not None:
            server.close()


def _exchange(
    rendezvous: Rendezvous, server: socket.socket, names: list[str], fd: int, secret: str
) -> list[int]:
    deadline = time.monotonic() + get_timeout(rendezvous.group_name)
    fds: list[int] = []
    problem: str | None = None
    try:
        with _giving(server, fd, secret) as refused:
            try:
                for rank, name in enumerate(names):
                    fds.append(fd if rank == rendezvous.rank else _take(rank, name, secret, deadline))
            except Exception as e:
                problem = describe(e)
            # Nobody stops giving before all have taken.
            rendezvous.report_outcome("hand out memory", refused[0] if refused else problem)
    except BaseException:  # also Ctrl-C while the giving comes to its end
        close_fds(fds, keep=fd)
        raise
    return fds


@contextmanager
def _giving(server: socket.socket, fd: int, secret: str) -> Iterator[list[str]]:
    """Inside the body a thread gives ``fd`` to whoever may have it. The list says why it could not go on, if so."""
    stop = threading.Event()
    refused: list[str] = []
    giver = threading.Thread(
        target=_give, args=(server, fd, secret, stop, refused), name="weft-give", daemon=True
    )
    giver.start()
    try:
        yield refused
    finally:
        stop.set()
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.setblocking(False)
            stranger.connect(server.getsockname())
        giver.join()  # it looks at `stop` between strangers


def _give(server: socket.socket, fd: int, secret: str, stop: threading.Event, refused: list[str]) -> None:
    server.settimeout(_SLICE)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError as e:
            refused.append(describe(e))
            server.close()  # waiting connections fail at once
            return
        with connection:
            try:
                if _same_user(connection) and hmac.compare_digest(
                    _read_exactly(connection, len(secret), stop), secret.encode()
                ):
                    socket.send_fds(connection, [b"."], [fd])
            except OSError:
                continue


def _take(rank: int, name: str, secret: str, deadline: float) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        try:
            connection.connect(f"\0{name}".encode())
            if not _same_user(connection):
                raise WeftError(f"rank {rank} runs as another user")
            connection.sendall(secret.encode())
            _, fds, flags, _ = socket.recv_fds(connection, 1, 1)
        except TimeoutError:
            raise WeftError(f"rank {rank} did not hand over its descriptor in time") from None
        except ConnectionError as e:
            raise WeftError(f"rank {rank} did not hand over its descriptor: {e.strerror}") from None
    if not fds and flags & socket.MSG_CTRUNC:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    if not fds:
        raise WeftError(f"rank {rank} refused its descriptor")
    return fds[0]


def close_fds(fds: list[int], keep: int = -1) -> None:
    for fd in fds:
        if fd != keep:
            os.close(fd)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _read_exactly(connection: socket.socket, count: int, stop: threading.Event) -> bytes:
    """``count`` bytes, in all within the time that a stranger gets: one who says nothing must not use up the ranks'."""
    connection.settimeout(_SLICE)
    data, end = b"", time.monotonic() + _STRANGER
    while len(data) < count and time.monotonic() < end and not stop.is_set():
        try:
            part = connection.recv(count - len(data))
        except TimeoutError:
            continue
        if not part:
            raise ConnectionError("closed early")
        data += part
    return data
