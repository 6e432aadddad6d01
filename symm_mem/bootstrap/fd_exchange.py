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
from contextlib import suppress
from io import FileIO

from .. import forks
from ..errors import WeftError, describe
from ..timeouts import get_timeout
from .rendezvous import Rendezvous

_SLICE = 0.1  # seconds: how often a giver looks whether it is still wanted, or has files again
_STRANGER = 2.0  # seconds that whoever connects may take to show the secret
_AT_ONCE = 250  # descriptors in one message: the kernel takes 253
_WAITING = 128  # connections that an offer has wait
_PASSING = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED)  # what an offer that lasts outlives


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
    offer: Offer | None = None
    problem: str | None = None
    try:
        try:
            offer = Offer(fds, secret)
        except Exception as e:
            problem = describe(e)
        posts = rendezvous.gather("hand out memory", [offer and offer.name, problem])
        rendezvous.refuse("hand out memory", [post[1] for post in posts])
        assert offer is not None
        return _exchange(
            rendezvous, offer, fds, secret, [(post[0], n) for post, n in zip(posts, counts, strict=True)]
        )
    finally:
        if offer is not None:
            offer.close()


def _exchange(
    rendezvous: Rendezvous, offer: Offer, fds: list[int], secret: str, others: list[tuple[str, int]]
) -> list[list[int]]:
    """``others``: of each rank the offer's name, and how many it gives."""
    deadline = time.monotonic() + get_timeout(rendezvous.group_name)
    taken: list[list[int]] = []
    problem: str | None = None
    try:
        try:
            for rank, (name, count) in enumerate(others):
                taken.append(fds if rank == rendezvous.rank else _take(rank, name, secret, deadline, count))
        except Exception as e:
            problem = describe(e)
        # Nobody stops giving before all have taken.
        rendezvous.report_outcome("hand out memory", next(iter(offer.problems), problem))
        offer.close()
    except BaseException:  # also Ctrl-C while the giving comes to its end
        close_fds([fd for got in taken if got is not fds for fd in got])
        raise
    return taken


def _take(rank: int, name: str, secret: str, deadline: float, count: int) -> list[int]:
    try:
        return take(f"rank {rank}", name, secret, max(0.001, deadline - time.monotonic()), count)
    except TimeoutError:
        raise WeftError(f"rank {rank} did not hand over its descriptor in time") from None


def take(who: str, name: str, secret: str, seconds: float, count: int = 1) -> list[int]:
    """The ``count`` descriptors that ``who`` offers at the socket ``name``.

    Raises:
        TimeoutError: they were not given in so many seconds.
        WeftError: they were refused, or nobody is there.
    """
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
    """Descriptors that are given to each who asks for them, until the offer is closed or nobody keeps it any more.

    Args:
        lasting: each gets an open file description of its own of the first one, as ``flock`` needs it, that ends with
            the process that has it; and who asks while this process has no file left is given it later.

    Attributes:
        name: the socket's, for ``take``.
        problems: why nothing is given any more, if so.
    """

    def __init__(self, fds: list[int], secret: str, *, lasting: bool = False) -> None:
        self.name = f"weft-{secrets.token_hex(16)}"
        self.problems: list[str] = []
        # None of the descriptions that are given is that of `fd`, whose locks a forked child must not keep.
        source = FileIO(f"/proc/self/fd/{fds[0]}") if lasting else None
        server, stop = _listening(self.name), threading.Event()
        # Not the timeout of socket.setdefaulttimeout, after which nothing would be given any more.
        server.settimeout(None if lasting else _SLICE)
        given = fds if source is None else source.fileno()
        thread = threading.Thread(
            target=_give, args=(server, given, secret, stop, self.problems), name="weft-give", daemon=True
        )
        self._end = weakref.finalize(self, _end_offer, forks.pid, server, source, stop, thread)
        self._end.atexit = False
        thread.start()

    def close(self) -> None:
        """Also in a forked child, of whose parent's offer it closes what it has."""
        self._end()


def _give(
    server: socket.socket, given: list[int] | int, secret: str, stop: threading.Event, problems: list[str]
) -> None:
    """``given``: the descriptors, or that of a file of which each who asks gets a description of its own."""
    lasting = isinstance(given, int)
    while not stop.is_set():
        try:
            connection, _ = server.accept()
        except TimeoutError:
            continue
        except OSError as e:
            if stop.is_set() or (lasting and e.errno in _PASSING and not stop.wait(_SLICE)):
                continue
            problems.append(describe(e))
            server.close()  # waiting connections fail at once
            return
        with connection, suppress(OSError):
            if _knows(connection, secret, stop):
                _send(connection, given)


def _send(connection: socket.socket, given: list[int] | int) -> None:
    if isinstance(given, int):
        with FileIO(f"/proc/self/fd/{given}", "r+") as own:
            socket.send_fds(connection, [b"."], [own.fileno()])
        return
    for at in range(0, len(given), _AT_ONCE):
        socket.send_fds(connection, [b"."], given[at : at + _AT_ONCE])


def _knows(connection: socket.socket, secret: str, stop: threading.Event) -> bool:
    return _same_user(connection) and hmac.compare_digest(
        _read_exactly(connection, len(secret), stop), secret.encode()
    )


def _end_offer(
    owner: int, server: socket.socket, source: FileIO | None, stop: threading.Event, thread: threading.Thread
) -> None:
    stop.set()
    if owner == forks.pid:  # a child has no such thread, and the socket is its parent's, too
        with suppress(OSError):
            server.shutdown(socket.SHUT_RDWR)  # ends the thread's wait
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join()
    server.close()
    if source is not None:
        source.close()


def _listening(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        server.bind(f"\0{name}".encode())
        server.listen(_WAITING)
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
