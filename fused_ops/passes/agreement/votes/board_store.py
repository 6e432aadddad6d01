"""What the ranks of a vote board tell each other through the group's store: whatever is not said at each graph."""

from __future__ import annotations

import json
import secrets
import weakref
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import ProcessGroup, Store

from .....symm_mem import forks, get_timeout
from .....symm_mem.bootstrap.store import GroupStore, StoreQuestions, peek
from .vote import Vote

WHAT = "agree on a graph"  # in errors

T = TypeVar("T")

_tokens: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()


class BoardStore:
    """One rank's keys, under a prefix that is this board's alone."""

    def __init__(self, group: ProcessGroup) -> None:
        self._owner = forks.Owner(group)
        self.rank, self.size = group.rank(), group.size()
        self._name = group.group_name
        self._store = GroupStore(group)
        self._prefix = self._new_prefix(_tokens.setdefault(group, secrets.token_hex(8)))
        self._blind: tuple[int, str] | None = None

    def _asked(self, question: Callable[[Store], T]) -> T:
        self._owner.refuse_child(WHAT)
        with StoreQuestions(self._store.get(WHAT), WHAT, self._name, self.rank) as store:
            store.limit(get_timeout(self._name))
            return store.ask(question)

    def _new_prefix(self, token: str) -> str:
        """A store may outlive a group of this name: each rank counts those that had a board, so that keys are new.

        ``token``: the group's, which is counted once, however often an exception has ended the making of its board.
        """
        prefix = f"weft/{self._name}/agree"
        key = f"{prefix}/made/{self.rank}"

        def count(store: Store) -> str:
            number, _, last = peek(store, key).partition(" ")
            if last != token:
                number = str(int(number or 0) + 1)
                store.set(key, f"{number} {token}")
            return number

        return f"{prefix}/{self._asked(count)}"

    def _set(self, key: str, value: str) -> None:
        self._asked(lambda s: s.set(f"{self._prefix}/{key}", value))

    def _peek(self, key: str) -> str:
        return self._asked(lambda s: peek(s, f"{self._prefix}/{key}"))

    def _leave_note(self, post: Vote) -> None:
        """Where a rank that waits for nobody leaves its post while there is no board, or it would be waited for."""
        self._set(f"note/{self.rank}", json.dumps(post._asdict()))

    def _note(self, rank: int) -> Vote | None:
        found = self._peek(f"note/{rank}")
        return Vote(**json.loads(found)) if found else None

    def tell(self, signature: int, text: str) -> None:
        """Lets the others know what a signature of this rank stands for."""
        self._set(f"graph/{signature}", text)

    def said(self, signature: int) -> str | None:
        """What a signature stands for."""
        return self._peek(f"graph/{signature}") or None

    @property
    def blind(self) -> tuple[int, str] | None:
        """A rank that will never see the board, as far as this one knows, and why."""
        return self._blind

    @property
    def _is_blind(self) -> bool:
        return self._blind is not None and self._blind[0] == self.rank

    def _tell_blind(self, why: str) -> None:
        self._set("blind", json.dumps([self.rank, why]))
        self._blind = self.rank, why

    def _all_see(self) -> bool:
        """Whether no rank is known that cannot see the board: one of another host, say."""
        if self._blind is None and (found := self._peek("blind")):
            rank, why = json.loads(found)
            self._blind = rank, why
        return self._blind is None
