"""Random registrations, transfers and deaths: `python tests/soak/registrations.py --steps 100000 --ranks 2`.

Tensors of each kind of memory, of sizes that differ by rank, registered one by one and in batches, found again,
dropped by the ranks at different times or unregistered; between that puts and gets in a ring, each compared. It fails
when one is wrong, a wait expires, ranks come to know different registrations, or a rank holds more memory, descriptors
or threads at the end than after the first third. The seed is printed; the same seed makes the same steps.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path

import torch
from usage import Usage
from weft import symm_mem
from weft.symm_mem.heap.registry import get_heap

sys.path.insert(0, str(Path(__file__).parents[1]))
from ranks import run_ranks

_MOST_HELD = 40


class Registering:
    """One rank's part. What all must do alike is drawn from ``same``, what each does for itself from ``own``."""

    def __init__(self, rank: int, world_size: int, seed: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.same, self.own = random.Random(seed), random.Random(f"{seed} {rank}")
        self.arena = symm_mem.empty(1 << 14)
        self.held: list[symm_mem.RegisteredTensor] = []
        self.late: list[symm_mem.RegisteredTensor] = []  # dropped by the ranks, but not by this one yet
        self.steps: dict[str, int] = {}

    def step(self) -> None:
        room = len(self.held) < _MOST_HELD
        kinds = {"register": 3 * room + 1, "transfer": 6, "find": 2, "drop": 3, "unregister": 2}
        if not self.held:
            kinds = {"register": 1}
        (kind,) = self.same.choices(list(kinds), list(kinds.values()))
        self.steps[kind] = self.steps.get(kind, 0) + 1
        getattr(self, f"_{kind}")()
        self.late = [x for x in self.late if self.own.random() < 0.7]

    def _tensor(self) -> torch.Tensor:
        rows, columns = self.own.randrange(0, 6), self.own.randrange(1, 300)
        kind = self.own.choice(["private", "private", "shared", "heap", "view", "transposed"])
        if kind == "shared":
            return torch.zeros(rows + 1, columns).share_memory_()
        if kind == "heap":
            at = self.own.randrange(1 << 13)
            return self.arena[at : at + rows * columns].view(rows, columns)
        if kind == "view":
            return torch.zeros(2 * rows + 1, columns + 7)[1::2, 3 : 3 + columns]
        return torch.zeros(columns, rows).t() if kind == "transposed" else torch.zeros(rows, columns)

    def _register(self) -> None:
        self.held += symm_mem.register([self._tensor() for _ in range(self.same.randrange(1, 5))])

    def _find(self) -> None:
        x = self.same.choice(self.held)
        found = symm_mem.register([x.tensor])
        assert found == [x] or x.tensor.data_ptr() == found[0].tensor.data_ptr()

    def _drop(self) -> None:
        for _ in range(min(len(self.held), self.same.randrange(1, 4))):
            self.late.append(self.held.pop(self.same.randrange(len(self.held))))

    def _unregister(self) -> None:
        ending = [self.held.pop(self.same.randrange(len(self.held))) for _ in range(min(len(self.held), 2))]
        symm_mem.unregister(ending)

    def _transfer(self) -> None:
        x, value = self.same.choice(self.held), self.same.randrange(1 << 20)
        right, left = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        kind = self.same.randrange(3)
        if kind == 0:
            each = list(dict.fromkeys(self.same.choices(self.held, k=self.same.randrange(1, 6))))
            symm_mem.batch_signal([(y, left) for y in each])
            symm_mem.batch_put(
                [(y, torch.full(y.shapes[right], float(value + self.rank)), right) for y in each]
            )
            symm_mem.batch_wait([(y, left) for y in each])
            for y in each:
                if y.of.keys[self.rank][1][0] != "heap":  # of which several may be the same memory
                    assert (y.tensor == value + left).all(), f"batch_put into {y.number}"
        elif kind == 1:
            x.signal(left)
            x.put(torch.full(x.shapes[right], float(value + self.rank)), right)
            x.wait(left)
            assert (x.tensor == value + left).all(), f"put into {x.number}"
        else:
            x.tensor.fill_(value + self.rank)
            x.signal(left)
            out = x.get(torch.full(x.shapes[right], float("nan")), right)
            assert (out == value + right).all(), f"get from {x.number}"
            x.wait(left)


def works(rank: int, world_size: int, steps: int, seed: int) -> dict[str, int]:
    symm_mem.set_timeout(60)
    registering = Registering(rank, world_size, seed)
    early: Usage | None = None
    for step in range(steps):
        registering.step()
        if step == max(steps // 3, min(300, steps - 1)):
            early = Usage.measure([get_heap()])
    held = list(registering.late)
    registering.late.clear()
    del held
    symm_mem.unregister(registering.held)
    registering.held.clear()
    (last,) = symm_mem.register([torch.zeros(1)])
    assert symm_mem.stats().registered == 1, symm_mem.stats()
    symm_mem.unregister([last])
    assert early is not None
    grown = Usage.measure([get_heap()]).grown(early)
    assert not grown, grown
    return registering.steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    begin = time.monotonic()
    how = {"fresh": True, "timeout": 3600.0, "store": "tcp", "device": given.device}
    done = run_ranks(works, given.ranks, given.steps, given.seed, **how)
    print(f"{given.steps} steps on {given.ranks} ranks in {time.monotonic() - begin:.0f} s: {done[0]}")


if __name__ == "__main__":
    main()
