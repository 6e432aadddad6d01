"""Draws random sharded programs.

Drawing one runs it on meta tensors: that says which shapes there are to choose from. Gathers and scatters are mostly
spelled as torch spells them, with a product on the right side of them; every step on the way may be a wrong one, and
others may come between: so there are programs with a form that the pass knows, and many that are nearly that.
"""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import strategies as st
from random_programs import Machine, Random

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Writer:
    """Draws a program step by step."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self.program = Random(draw(st.sampled_from([2, 2, 3])))
        self.program.rows = self.draw(False, False, True)
        self.machine = Machine(self.program.world, [], None)
        self.dtype = draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16]))

    def draw(self, *choices: Any) -> Any:
        return self._draw(st.sampled_from(choices))

    def size(self, low: int, high: int) -> int:
        return self._draw(st.integers(low, high))

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self.machine.values[i].shape)

    def dtype_of(self, i: int) -> torch.dtype:
        return self.machine.values[i].dtype

    def do(self, name: str, *args: Any) -> int:
        """The number of the step's first value."""
        step = (name, *args)
        before = len(self.machine.values)
        self.machine.run(step)
        self.program.steps.append(step)
        return before

    def new(self, *shape: int, dtype: torch.dtype | None = None, shared: bool = False) -> int:
        if shared:
            self.program.shared.append(len(self.program.inputs))
        self.program.inputs.append((shape, dtype or self.dtype))
        self.machine.inputs.append(torch.empty(shape, dtype=dtype or self.dtype, device="meta"))
        return self.do("input", len(self.program.inputs) - 1)

    def noise(self, i: int) -> int:
        """Now and then something between two steps of a known form: mostly harmless, rarely not."""
        if self.size(0, 5):
            return i
        shape = self.shape(i)
        kind = self.draw(
            "clone",
            "cast",
            "unary",
            "slice",
            "permute",
            "squeeze",
            "write",
            "write_part",
            "wait",
            "number",
            "factor",
            "other",
        )
        if kind in ("clone", "wait"):
            return self.do(kind, i)
        if kind == "cast":
            return self.do("cast", i, self.draw(*DTYPES))
        if kind == "unary":
            return self.do("unary", i, self.draw("neg", "relu", "abs"))
        if kind == "number":
            return self.do("number", i, self.draw("add", "left", "sub", "factor"), self.draw(0, 0, 0.0, 1))
        if kind == "factor":
            return self.scaled(i)
        if kind in ("write", "write_part") and shape and 0 not in shape:
            # Of this value, or of any other: an input, a view of this one, what is gathered just now.
            target = self.draw(i, self.size(0, len(self.machine.values) - 1))
            if kind == "write":
                self.do("write", target)
            elif self.shape(target):
                self.do("write_part", target, self.size(0, len(self.shape(target)) - 1))
            return i
        if kind == "slice" and shape:
            dim = self.size(0, len(shape) - 1)
            if shape[dim] > 1:
                start = self.size(0, 1)
                return self.do("slice", i, dim, start, shape[dim] - self.size(0, 1 - start))
        if kind == "permute" and len(shape) > 1:
            return self.do("permute", i, self._draw(st.permutations(range(len(shape)))))
        if kind == "squeeze" and 1 in shape:
            return self.do("squeeze", i)
        return i

    def scaled(self, i: int) -> int:
        """By a number that is a factor, or rarely by none."""
        if self.size(0, 2) == 0:
            return self.do("unary", i, "neg")
        number = self.draw(1, 2, 3, -1, 0.5, -2.0)
        return self.do("number", i, *self.draw(("factor", number - 1), ("divisor", 2), ("factor", -1)))

    def cut_and_cat(self, i: int, dim: int, to: int) -> int:
        """The spelling of a gather or scatter along another dimension; right, most of the time."""
        count, whole = self.program.world, self.shape(i)[dim]
        if whole < count:
            return i
        step = whole // count
        bounds = [(k * step, (k + 1) * step) for k in range(count)]
        wrong = self.draw("", "", "", "", "swap", "repeat", "shift", "short", "fewer")
        if wrong == "swap":
            bounds = self._draw(st.permutations(bounds))
        elif wrong == "repeat":
            bounds = [self.draw(*bounds) for _ in bounds]
        elif wrong == "shift" and step > 1:
            bounds = [(a - 1, b - 1) if a else (a, b) for a, b in bounds]
        elif wrong == "short" and step > 1:
            bounds = [(k * (step - 1), (k + 1) * (step - 1)) for k in range(count)]
        elif wrong == "fewer":
            bounds = bounds[:-1]
        if dim == 0 and whole % count == 0 and wrong in ("", "swap", "repeat") and self.size(0, 4) == 4:
            parts = [a // step for a, _ in bounds]
            first = self.do("unbind", i, count, parts)
            return self.do("cat", [first + k for k in range(count)], to)
        even = whole % count == 0 and all(b - a == step and a % step == 0 for a, b in bounds)
        spelling = self.draw("split", "sizes", "slice") if even else "slice"
        first = self.do("cut", i, dim, spelling, bounds)
        parts = [self.noise(first + k) if self.size(0, 9) == 9 else first + k for k in range(len(bounds))]
        shapes = [self.shape(p) for p in parts]
        same = len({(*s[:to], *s[to + 1 :]) for s in shapes if len(s) > to}) == 1
        if not same or any(len(s) <= to for s in shapes) or len({self.dtype_of(p) for p in parts}) > 1:
            return parts[0]
        return self.do("cat", parts, to)

    def gathered(self, x: int) -> int:
        """x, gathered along some dimension."""
        if not self.shape(x):
            x = self.do("reshape", x, [1])
        dims = len(self.shape(x))
        group = self.draw(0, 0, 0, 1)
        to = self.size(0, dims - 1)
        if to and self.size(0, 3) == 3:
            # Permuted, gathered, permuted back: along one and the same dimension, or not.
            there = [to, *(d for d in range(dims) if d != to)]
            y = self.do("gather", self.do("clone", self.do("permute", x, there)), group)
            back = [there.index(d) for d in range(dims)]
            return self.do("permute", y, self.draw(back, back, back, there))
        y = self.noise(self.do("gather", x, group, self.draw("", "", "", "", "coalesced", "out")))
        return y if to == 0 or to >= len(self.shape(y)) else self.noise(self.cut_and_cat(y, 0, to))

    def matrix(self, i: int) -> int:
        """i as a matrix: by its rows, rarely otherwise."""
        shape = self.shape(i)
        if len(shape) < 2:
            return self.do("reshape", i, [self.draw(1, shape[0] if shape else 1), -1])
        if self.size(0, 9) == 9:
            return self.do("reshape", i, [shape[0], -1])
        return i if len(shape) == 2 and self.size(0, 1) else self.do("flatten", i)

    def product(self, i: int, columns: int) -> int:
        """Of the rows of i with something new of this many columns."""
        shape = self.shape(i)
        dtype = self.dtype_of(i)
        kind = self.draw("mm", "mm", "mm", "linear", "addmm", "bmm", "right")
        if kind == "linear" and shape:
            return self.do("linear", i, self.new(shape[-1], columns, dtype=dtype))
        a = self.noise(self.matrix(i))
        if len(self.shape(a)) != 2:
            a = self.do("reshape", a, [1, -1])
        (rows, k), dtype = self.shape(a), self.dtype_of(a)
        if kind == "right":
            return self.do("mm", self.new(columns, rows, dtype=dtype), a)
        B = self.new(k, columns, dtype=dtype)
        if kind == "addmm":
            scale = self.draw((1, 1), (1, 1), (1, 1), (2, 1), (1, 2))
            bias = self.draw((columns,), (columns,), (rows, columns), (1, columns))
            return self.do("addmm", self.new(*bias, dtype=dtype), a, B, *scale)
        if kind == "bmm":
            y = self.do("bmm", self.do("unsqueeze", a, 0), self.do("unsqueeze", B, 0))
            return self.do("reshape", y, [rows, columns])
        return self.do("mm", a, B)

    def products(self, x: int) -> list[int]:
        """One or several of the same, each perhaps used."""
        found = []
        for _ in range(self.draw(1, 1, 2, 3)):
            y = self.product(x, self.size(1, 5))
            found.append(self.do("unary", y, "relu") if self.size(0, 3) == 3 else y)
        return found

    def sum_of_products(self, lead: list[int], columns: int, source: int | None) -> int:
        """Of these sizes; the first of the products is of ``source``, if it has as many rows."""
        rows = 1
        for n in lead:
            rows *= n
        y = -1
        for _ in range(self.draw(1, 1, 1, 2, 3)):
            if source is not None and len(self.shape(source)) > 1:
                a = self.do("flatten", source)
                a = a if self.shape(a)[0] == rows else self.new(rows, self.size(1, 6))
            else:
                a = self.new(rows, self.size(1, 6))
            source = None
            B = self.new(self.shape(a)[1], columns, dtype=self.dtype_of(a))
            if y >= 0 and self.dtype_of(y) == self.dtype_of(a) and self.size(0, 1):
                y = self.do("addmm", y, a, B, *self.draw((1, 1), (1, 1), (1, 1), (1, 1), (1, 2)))
            else:
                y2 = self.do("mm", a, B)
                y2 = self.scaled(y2) if self.size(0, 4) == 4 else y2
                y = y2 if y < 0 else self.do(self.draw("add", "add", "sub"), y, y2, self.draw(1, 1, 1, 1, 2))
            if self.size(0, 7) == 7:
                bias = self.draw((columns,), (rows, columns), (rows, 1))
                y = self.do("add", y, self.new(*bias, dtype=self.dtype_of(y)))
        return self.noise(y)

    def lead(self, of: int | None) -> tuple[list[int], int]:
        """Sizes before the last, and the dimension that can be cut; as many rows as ``of`` has."""
        world = self.program.world
        if of is not None and len(self.shape(of)) > 1 and self.size(0, 2):
            shape = list(self.shape(of)[:-1])
            dims = [d for d, n in enumerate(shape) if n and n % world == 0]
            if dims:
                return shape, self.draw(*dims)
        shape = [self.size(1, 3) for _ in range(self.size(1, 3))]
        dim = self.size(0, len(shape) - 1)
        shape[dim] = shape[dim] * world - self.draw(0, 0, 0, 0, 0, 1)
        return shape, dim

    def all_gather_matmul(self, source: int | None) -> list[int]:
        x = source
        if x is None or not self.shape(x) or 0 in self.shape(x):
            x = self.new(*(self.size(1, 4) for _ in range(self.size(1, 3))), self.size(1, 6))
        y = self.gathered(self.noise(x))
        found = self.products(y)
        if self.size(0, 3) == 3:  # gathered once more, as inference does it for each product
            found += self.products(self.do(*self.again(x)))
        return found

    def again(self, x: int) -> tuple[Any, ...]:
        """The first gather of x, if there is one."""
        same = [s for s in self.program.steps if s[0] == "gather" and s[1] == x and s[3] == ""]
        return same[0] if same else ("gather", x, 0, "")

    def matmul_reduce_scatter(self, source: int | None) -> list[int]:
        lead, dim = self.lead(source)
        columns = self.size(1, 5)
        last = self.size(0, 7) == 7
        if last:
            dim, columns = len(lead), columns * self.program.world
        y = self.sum_of_products(lead, columns, source)
        shape = [*lead, columns]
        if sorted(self.shape(y)) == sorted(s for s in shape if s != 1) or len(lead) > 1:
            count = 1
            for n in self.shape(y):
                count *= n
            y = self.do("reshape", y, shape if count == self.product_of(shape) else [-1, self.shape(y)[-1]])
        y = self.noise(y)
        return [self.with_terms(self.scattered(y, min(dim, max(0, len(self.shape(y)) - 1))))]

    def with_terms(self, y: int) -> int:
        """What is added after a reduction: a bias, a residual, or nearly that; there before, or computed now."""
        for _ in range(self.draw(0, 0, 1, 1, 2)):
            shape, dtype = self.shape(y), self.dtype_of(y)
            if not shape:
                break
            if self.size(0, 5) == 5 and self.product_of(list(shape)):
                y = self.do("reshape", y, self.draw([-1], [1, *shape], [*shape[::-1]]))
                continue
            term = self.draw(shape, shape, shape, shape[-1:], shape[-1:], (1, *shape[1:]), (*shape[:-1], 1))
            other = self.draw(dtype, dtype, dtype, dtype, *DTYPES)
            term = self.new(*term, dtype=other)
            if self.size(0, 3) == 3:
                term = self.do("unary", term, "neg")
            if self.size(0, 5) == 5:
                self.do("write", self.draw(term, y, self.size(0, len(self.machine.values) - 1)))
            a, b = self.draw((y, term), (term, y))
            y = self.noise(self.do("add", a, b, self.draw(1, 1, 1, 1, 1, 2)))
        return y

    @staticmethod
    def product_of(shape: list[int]) -> int:
        count = 1
        for n in shape:
            count *= n
        return count

    def scattered(self, y: int, dim: int) -> int:
        op = self.draw("sum", "sum", "sum", "sum", "avg", "max", "min", "product")
        group = self.draw(0, 0, 0, 1)
        dims = list(range(len(self.shape(y))))
        back: list[int] | None = None
        if dim and self.size(0, 2) == 2:
            there = [dim, *(d for d in dims if d != dim)]
            y = self.do("clone", self.do("permute", y, there))
            back = [there.index(d) for d in dims]
        elif dim:
            if self.shape(y)[dim] % self.program.world and self.size(0, 1):
                y = self.do("padded", y, dim, 0)
            y = self.cut_and_cat(y, dim, 0)
        if not self.shape(y):
            y = self.do("reshape", y, [1])
        rest = self.shape(y)[0] % self.program.world
        if rest:
            if self.draw(False, False, True):
                y = self.do("padded", y, 0, self.draw(0, 0, 0, 1))
            elif self.shape(y)[0] < self.program.world:
                return y
            else:
                y = self.do("slice", y, 0, 0, self.shape(y)[0] - rest)
        out = self.do("scatter", y, op, group, self.draw("", "", "", "", "coalesced", "out"))
        return out if back is None else self.do("permute", out, back)

    def matmul_all_reduce(self, source: int | None) -> list[int]:
        """One or several that are summed, perhaps with a residual and a norm after them."""
        lead, _ = self.lead(source)
        columns, group = self.size(1, 5), self.draw(0, 0, 0, 1)
        y = self.all_reduced(lead, columns, group, source)
        for _ in range(self.draw(0, 0, 0, 1, 2)):
            other = self.all_reduced(lead, columns, self.draw(group, group, group, 1), source)
            if self.shape(other) == self.shape(y) and self.dtype_of(other) == self.dtype_of(y):
                if self.size(0, 2) == 2:
                    residual = self.new(*self.shape(y), dtype=self.dtype_of(y), shared=True)
                    y = self.do("add", y, residual)
                    if self.size(0, 2) == 2:
                        self.do("write", self.draw(residual, residual, y))
                y = self.noise(self.do("add", y, other, self.draw(1, 1, 1, 2)))
        with_norm = self.program.rows or self.size(0, 2) == 2
        return self.normed(y) if with_norm and self.shape(y) else [y]

    def normed(self, y: int) -> list[int]:
        """A norm in one of its spellings, of a sum with a residual or without."""
        of_sum = self.size(0, 2) == 2
        if not of_sum and self.size(0, 2):
            residual = self.new(*self.shape(y), dtype=self.dtype_of(y), shared=True)
            y = self.do("add", y, residual, self.draw(1, 1, 1, 2))
        y = self.noise(y)
        shape, dtype = self.shape(y), self.dtype_of(y)
        if not shape:
            return [y]
        weight = self.new(shape[-1], dtype=self.draw(dtype, dtype, torch.float32), shared=True)
        if of_sum:
            residual = self.new(*shape, dtype=self.draw(dtype, dtype, dtype, torch.float32), shared=True)
            first = self.do("norm_of_sum", y, residual, weight)
            return [self.in_fp8(first), first + 1]
        return [
            y,
            self.in_fp8(self.do("norm", y, weight, self.draw("", "", "Gemma", "layer", "layer, bias"))),
        ]

    def in_fp8(self, normed: int) -> int:
        """The norm by way of fp8, or as it is."""
        if self.size(0, 2) or 0 in self.shape(normed):
            return normed
        scale = self.new(1, dtype=torch.float32) if self.size(0, 2) == 2 else None
        return self.do(
            "in_fp8", normed, scale, self.draw("reciprocal", "divide", "multiply", "another bound")
        )

    def all_reduced(self, lead: list[int], columns: int, group: int, source: int | None) -> int:
        if self.size(0, 5) == 5:  # of what is no product
            y = self.do("unary", self.new(*lead, columns), "relu")
        else:
            y = self.sum_of_products(lead, columns, source)
        last = self.shape(y)[-1:]  # none of a number
        if self.product_of(list(self.shape(y))) == self.product_of([*lead, *last]):
            y = self.noise(self.do("reshape", y, [*lead, *last]))
        op = self.draw("sum", "sum", "sum", "sum", "avg", "max", "product")
        spelling = self.draw("", "", "", "", "in place", "coalesced")
        return self.do("reduce", y, op, group, spelling)

    def write(self) -> Random:
        ends: list[int] = []
        source: int | None = None
        for _ in range(self.draw(1, 1, 2, 3)):
            motifs = self.all_gather_matmul, self.matmul_reduce_scatter, self.matmul_all_reduce
            motif = self.draw(*motifs, *[self.matmul_all_reduce] * (4 * self.program.rows))
            found = motif(source if self.size(0, 2) else None)
            ends += found
            source = self.noise(self.draw(*found))
        values = range(len(self.machine.values))
        others = self._draw(st.lists(st.sampled_from(values), max_size=2))
        self.program.outputs = list(dict.fromkeys([*ends, *others]))
        self.program.dynamic = self.size(0, 5) == 5
        self.program.normalized = self.size(0, 3) > 0
        self.program.alone = self.draw(False, False, True, "auto")
        self.program.own_numbers = self.size(0, 4) == 4
        return self.program


@st.composite
def programs(draw: st.DrawFn) -> Random:
    return Writer(draw).write()
