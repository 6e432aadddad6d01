"""Ranks agree with each other through the group's store, and hand each other file descriptors.

Every step has a number. A rank posts what it wants under (step, rank) and reads what the others posted:
whoever differs is named with both values, whoever is missing is named when the deadline has passed.
Descriptors travel over Unix sockets (SCM_RIGHTS): to processes of the same user alone, and only to those
that know the group's secret, which stands in the store. The sockets' names are random and abstract, so
nothing is left on the file system however a process ends.
"""

from __future__ import annotations

import hmac
import json
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import ProcessGroup, Store
from torch.distributed.distributed_c10d import _get_process_group_store

from .errors import PeerTimeout, RankMismatch, WeftError


class Rendezvous:
    """The meeting point of one group's ranks. Every method is collective."""

    def __init__(self, group: ProcessGroup, topic: str, timeout: Callable[[], float]) -> None:
        self.group_name: str = group.group_name
        self.rank, self.world_size = group.rank(), group.size()
        self._store: Store = _get_process_group_store(group)
        self._timeout = timeout
        self._step = 0
        # A store may outlive a group of this name: each rank counts its own meetings, so that keys are new.
        prefix = f"weft/{self.group_name}/{topic}"
        self._prefix = f"{prefix}/{self._store.add(f'{prefix}/made/{self.rank}', 1)}"

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"

    def gather(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (JSON), by rank.

        Raises:
            PeerTimeout: a rank did not come.
            RankMismatch: a rank came with another ``what``.
        """
        step, self._step = self._step, self._step + 1
        self._store.set(self._key(step, self.rank), json.dumps([what, value]))
        posts = [self._read(step, rank, what) for rank in range(self.world_size)]
        if step:  # whoever posted this step has read the one before
            self._store.delete_key(self._key(step - 1, self.rank))
        for rank, (topic, _) in enumerate(posts):
            if topic != posts[0][0]:
                raise RankMismatch(f"step {step}", self.group_name, rank, repr(topic), repr(posts[0][0]))
        return [post[1] for post in posts]

    def agree(self, what: str, value: dict[str, Any]) -> None:
        """Every rank must come with the same ``value``.

        Raises:
            RankMismatch: on every rank, naming the first rank that differs from rank 0 and both values.
        """
        self.check_equal(what, self.gather(what, value))

    def check_equal(self, what: str, values: list[dict[str, Any]]) -> None:
        for rank, value in enumerate(values):
            if value != values[0]:
                raise RankMismatch(what, self.group_name, rank, _text(value), _text(values[0]))

    def settle(self, what: str, problem: str | None) -> None:
        """All ranks go on, or none: raises on every rank when one of them has a problem."""
        for rank, text in enumerate(self.gather(what, problem)):
            if text is not None:
                raise WeftError(f"{what} in group {self.group_name!r}: rank {rank}: {text}")

    def _read(self, step: int, rank: int, what: str) -> Any:
        key, timeout = self._key(step, rank), self._timeout()
        try:
            self._store.wait([key], timedelta(seconds=timeout))
        except Exception as e:
            if "imeout" not in str(e) and "imed out" not in str(e):
                raise
            raise PeerTimeout(
                what,
                self.group_name,
                self.rank,
                rank,
                f"step {step} in the store",
                "a post",
                "nothing",
                timeout,
            ) from None
        return json.loads(self._store.get(key))

    def exchange_fds(self, fd: int, secret: str) -> list[int]:
        """Give every rank ``fd`` and get theirs. The entry of the own rank is ``fd`` itself; close the others."""
        if self.world_size == 1:
            return [fd]
        deadline = time.monotonic() + self._timeout()
        name = b"\0weft-" + secrets.token_hex(16).encode()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            server.bind(name)
            server.listen(self.world_size)
            names = self.gather("hand out memory", name[1:].decode())
            giver = threading.Thread(target=self._give, args=(server, fd, secret, deadline), daemon=True)
            giver.start()
            fds: list[int] = []
            try:
                for rank, peer in enumerate(names):
                    fds.append(fd if rank == self.rank else self._take(rank, peer, secret, deadline))
            except BaseException:
                close_fds(fds, keep=fd)
                raise
            finally:
                giver.join(max(0.0, deadline - time.monotonic()))
        return fds

    def _give(self, server: socket.socket, fd: int, secret: str, deadline: float) -> None:
        given = 0
        while given < self.world_size - 1 and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                connection, _ = server.accept()
            except OSError:
                return  # the taker on the other side reports who is missing
            with connection:
                connection.settimeout(min(left, 2.0))  # a stranger who says nothing must not use up the time
                try:
                    if _same_user(connection) and hmac.compare_digest(
                        _read_exactly(connection, 64), secret.encode()
                    ):
                        socket.send_fds(connection, [b"."], [fd])
                        given += 1
                except OSError:
                    continue

    def _take(self, rank: int, name: str, secret: str, deadline: float) -> int:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            try:
                connection.settimeout(max(0.001, deadline - time.monotonic()))
                connection.connect(b"\0" + name.encode())
                if not _same_user(connection):
                    raise WeftError(f"hand out memory: rank {rank} runs as another user")
                connection.sendall(secret.encode())
                _, fds, _, _ = socket.recv_fds(connection, 1, 1)
            except (TimeoutError, ConnectionError) as e:
                raise PeerTimeout(
                    "hand out memory",
                    self.group_name,
                    self.rank,
                    rank,
                    "its descriptor",
                    "sent",
                    str(e),
                    self._timeout(),
                ) from e
        if not fds:
            raise WeftError(f"hand out memory: rank {rank} refused its descriptor")
        return fds[0]


def close_fds(fds: list[int], keep: int = -1) -> None:
    for fd in fds:
        if fd != keep:
            os.close(fd)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", credentials)[1] == os.getuid()


def _read_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connection.recv(count - len(data))
        if not part:
            raise ConnectionError("closed early")
        data += part
    return data


def _text(value: dict[str, Any]) -> str:
    return ", ".join(f"{k}={v}" for k, v in value.items())
