"""Ranks hand each other file descriptors.

They travel over Unix sockets (SCM_RIGHTS): to processes of the same user alone, and only to those that know the
group's secret, which stands in the store. The sockets' names are random and abstract, so nothing is left on the file
system however a process ends. Each lives for one exchange, that of an ``Offer`` until it is closed. What is received is
compared, never interpreted.
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
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from typing import NamedTuple

from .. import forks
from ..errors import WeftError, describe
from ..timeouts import get_timeout
from .rendezvous import Rendezvous

_SLICE = 0.1  # seconds: how often a giver looks whether it is still wanted
_STRANGER = 2.0  # seconds that whoever connects may take to show the secret
_AT_ONCE = 250  # descriptors in one message: the kernel takes 253
_WAITING = 128  # connections that an offer has wait


def exchange(rendezvous: Rendezvous, fd: int, secret: str) -> list[int]:
    """Give every rank ``fd`` and get theirs. The entry of this rank is ``fd`` itself; close the others. Collective.

    Raises:
        PeerTimeout: a rank did not come.
        WeftError: on every rank, when a descriptor could not be handed over.
    """
    return [fds[0] for fds in exchange_many(rendezvous, [fd], secret, [1] * rendezvous.world_size)]


def exchange_many(rendezvous: Rendezvous, fds: list[int], secret: str, counts: list[int]) -> list[list[int]]:
    """The same of several: ``fds`` of this rank, and ``counts`` says how many each rank gives.

    Raises:
        PeerTimeout, WeftError: as ``exchange``.
    """
    if rendezvous.world_size == 1:
        return [fds]
    server: socket.socket | None = None
    name, problem = _new_name(), None
    try:
        try:
            server = _listening(name, 2 * rendezvous.world_size)
        except OSError as e:
            problem = describe(e)
        posts = rendezvous.gather("hand out memory", [name, problem])
        rendezvous.refuse("hand out memory", [post[1] for post in posts])
        assert server is not None
        give = _Give(fds, secret, [post[0] for post in posts], counts)
        return _exchange(rendezvous, server, give)
    finally:
        if server is not None:
            server.close()


class _Give(NamedTuple):
    """What this rank gives, and where it finds how many of each rank."""

    fds: list[int]
    secret: str
    names: list[str]
    counts: list[int]


def _exchange(rendezvous: Rendezvous, server: socket.socket, give: _Give) -> list[list[int]]:
    deadline = time.monotonic() + get_timeout(rendezvous.group_name)
    taken: list[list[int]] = []
    problem: str | None = None
    try:
        with _giving(server, give.fds, give.secret) as refused:
            try:
                for rank, (name, count) in enumerate(zip(give.names, give.counts, strict=True)):
                    if rank == rendezvous.rank:
                        taken.append(give.fds)
                    else:
                        taken.append(_take(rank, name, give.secret, deadline, count))
            except Exception as e:
                problem = describe(e)
            # Nobody stops giving before all have taken.
            rendezvous.report_outcome("hand out memory", refused[0] if refused else problem)
    except BaseException:  # also Ctrl-C while the giving comes to its end
        close_fds([fd for fds in taken if fds is not give.fds for fd in fds])
        raise
    return taken


@contextmanager
def _giving(server: socket.socket, fds: list[int], secret: str) -> Iterator[list[str]]:
    """Inside the body a thread gives ``fds`` to whoever may have it. The list says why it could not go on, if so."""
    stop = threading.Event()
    refused: list[str] = []
    giver = threading.Thread(
        target=_give, args=(server, fds, secret, stop, refused), name="weft-give", daemon=True
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


def _give(
    server: socket.socket, fds: list[int], secret: str, stop: threading.Event, refused: list[str]
) -> None:
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
        with connection, suppress(OSError):
            if _knows(connection, secret, stop):
                for at in range(0, len(fds), _AT_ONCE):
                    socket.send_fds(connection, [b"."], fds[at : at + _AT_ONCE])


def _knows(connection: socket.socket, secret: str, stop: threading.Event) -> bool:
    return _same_user(connection) and hmac.compare_digest(
        _read_exactly(connection, len(secret), stop), secret.encode()
    )


def _take(rank: int, name: str, secret: str, deadline: float, count: int = 1) -> list[int]:
    try:
        return take_many(f"rank {rank}", name, secret, max(0.001, deadline - time.monotonic()), count)
    except TimeoutError:
        raise WeftError(f"rank {rank} did not hand over its descriptor in time") from None


def take(who: str, name: str, secret: str, seconds: float) -> int:
    """The descriptor that ``who`` gives at the socket ``name``.

    Raises:
        TimeoutError: it was not given in so many seconds.
        WeftError: it was refused, or nobody is there.
    """
    return take_many(who, name, secret, seconds, 1)[0]


def take_many(who: str, name: str, secret: str, seconds: float, count: int) -> list[int]:
    """The same of ``count`` descriptors."""
    taken: list[int] = []
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(seconds)
            if count:
                connection.connect(f"\0{name}".encode())
                if not _same_user(connection):
                    raise WeftError(f"{who} runs as another user")
                connection.sendall(secret.encode())
            while len(taken) < count:
                wanted = min(_AT_ONCE, count - len(taken))
                _, fds, flags, _ = socket.recv_fds(connection, 1, wanted, socket.MSG_CMSG_CLOEXEC)
                taken += fds
                if len(fds) < wanted and flags & socket.MSG_CTRUNC:
                    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                if len(fds) < wanted:
                    raise WeftError(f"{who} refused its descriptor")
    except BaseException as e:
        close_fds(taken)
        if isinstance(e, ConnectionError):
            raise WeftError(f"{who} did not hand over its descriptor: {e.strerror}") from None
        raise
    return taken


class Offer:
    """A file that is given to each who asks for it, until the offer is closed or nobody keeps it any more.

    Each gets an open file description of its own, as ``flock`` needs it, that ends with the process that has it.

    Attributes:
        name: the socket's, for ``take``.
    """

    def __init__(self, fd: int, secret: str) -> None:
        self.name = _new_name()
        # None of the descriptions that are given is that of `fd`, whose locks a forked child must not keep.
        source = FileIO(f"/proc/self/fd/{fd}")
        server, stop = _listening(self.name, _WAITING), threading.Event()
        thread = threading.Thread(
            target=_offer, args=(server, source.fileno(), secret, stop), name="weft-offer", daemon=True
        )
        self._end = weakref.finalize(self, _end_offer, forks.pid, server, source, stop, thread)
        self._end.atexit = False
        thread.start()

    def close(self) -> None:
        """Also in a forked child, of whose parent's offer it closes what it has."""
        self._end()


def _offer(server: socket.socket, fd: int, secret: str, stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except OSError as e:
            if stop.wait(_SLICE) or e.errno not in (
                errno.EMFILE,
                errno.ENFILE,
                errno.ENOMEM,
                errno.ECONNABORTED,
            ):
                return
            continue
        with connection, suppress(OSError):
            if _knows(connection, secret, stop):
                own = os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)
                try:
                    socket.send_fds(connection, [b"."], [own])
                finally:
                    os.close(own)


def _end_offer(
    owner: int, server: socket.socket, source: FileIO, stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    if owner == forks.pid:  # a child has no such thread, and the socket is its parent's, too
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()
    server.close()
    source.close()


def _new_name() -> str:
    return f"weft-{secrets.token_hex(16)}"


def _listening(name: str, waiting: int) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}".encode())
        server.listen(waiting)
    except BaseException:
        server.close()
        raise
    return server


def close_fds(fds: list[int]) -> None:
    for fd in fds:
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
