"""The tables of figures in README.md and docs/benchmarks.md, and the pictures, from files in bench/results/."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from charts import chart
from machine import ROOT
from pictures import gain_bars, layer_bars, layer_lanes
from report import best_peer, geometric_mean, ratio
from suite import Suite

RESULTS = ROOT / "bench" / "results"
PAGES = ("README.md", "docs/benchmarks.md")
_WORDS = {
    "all_gather_matmul": "all-gather + matmul",
    "matmul_reduce_scatter": "matmul + reduce-scatter",
    "matmul_all_reduce": "matmul + all-reduce",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_reduce_rms_norm": "all-reduce + RMSNorm",
    "all_reduce_layer_norm": "all-reduce + LayerNorm",
}
_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
_NORMS = ("all_reduce_rms_norm", "all_reduce_layer_norm")
_MATMULS = ("all_gather_matmul", "matmul_reduce_scatter", "matmul_all_reduce")
Row = dict[str, Any]


def _captured(machine: str, op: str) -> tuple[str, list[Row]]:
    """The date of a results file, and its rows that ran in CUDA graphs.

    Raises:
        ValueError: there is none, or a row has no time because its result was wrong.
    """
    content = json.loads((RESULTS / f"{machine}-{op}.json").read_text())
    rows = [row for row in content["rows"] if row["mode"] == "graph"]
    if not rows or any(not row["weft_us"] for row in rows):
        raise ValueError(f"{machine}-{op}.json: must have captured rows, all with a time")
    return content["meta"]["date"][:10], rows


def _cell(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mean(rows: Sequence[Row], above: str, below: str) -> str:
    return _cell(geometric_mean(ratio(row[above], row[below]) for row in rows))


def _lowest(rows: Sequence[Row]) -> str:
    return _cell(min(r for row in rows if (r := ratio(best_peer(row), row["weft_us"])) is not None))


def _against(rows: Sequence[Row]) -> list[str]:
    peers = geometric_mean(ratio(best_peer(row), row["weft_us"]) for row in rows)
    nccl, torch_ops = (_mean(rows, peer, "weft_us") for peer in ("unfused_us", "torch_us"))
    return [nccl, torch_ops, f"{_cell(peers)} ({_lowest(rows)})"]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def layers_table() -> list[str]:
    """Single layers on 2 H100."""
    found = []
    for op in _MATMULS[:2]:
        date, rows = _captured("h100-x2", op)
        for row in rows:
            if row["M"] == 8192 and not row["name"].startswith("gpt3"):
                times = [_cell(row[c], 0) for c in ("weft_us", "unfused_us", "torch_us", "limit_us")]
                found.append([f"{row['name']}, {_WORDS[op]}", *times])
    return _table(
        [f"2 H100, {date}, M = 8192, microseconds", "weft", "NCCL + cuBLAS", "torch", "limit"], found
    )


def matmuls_table() -> list[str]:
    """All layers, by machine and op."""
    found = []
    for machine, words in (("h100-x2", "2 H100"), ("h200-x2", "2 H200"), ("h200-x4", "4 H200")):
        for op in _MATMULS:
            date, rows = _captured(machine, op)
            long = [row for row in rows if row["M"] >= 4096]
            limits = [_mean(of, "weft_us", "limit_us") for of in (rows, long)]
            found.append([f"{_WORDS[op]}, {words}, {date}", str(len(rows)), *limits, *_against(rows)])
    return _table(
        [
            "",
            "rows",
            "weft / limit",
            "from M = 4096",
            "NCCL + cuBLAS / weft",
            "torch / weft",
            "best peer / weft (lowest)",
        ],
        found,
    )


def collectives_table() -> list[str]:
    """Collectives alone and with a norm, by machine."""
    found = []
    for machine, words, ops in (
        ("h200-x2", "2 H200", _COLLECTIVES + _NORMS),
        ("h100-x2", "2 H100", _COLLECTIVES + _NORMS),
        ("h100-x3", "3 H100", ("all_reduce",)),
        ("h100-x4", "4 H100", _COLLECTIVES),
        ("h200-x4", "4 H200", ("all_reduce_rms_norm",)),
    ):
        for op in ops:
            date, rows = _captured(machine, op)
            sizes = sorted(row["M"] * row["N"] * 2 for row in rows)
            least, most = (f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB" for n in (sizes[0], sizes[-1]))
            found.append(
                [f"{_WORDS[op]}, {words}, {date}", f"{len(rows)}, {least} to {most}", *_against(rows)]
            )
    return _table(["", "rows", "NCCL / weft", "torch / weft", "best peer / weft (lowest)"], found)


def process_group_table() -> list[str]:
    """``dist.all_reduce`` by the process group, from the first run of its file."""
    text = (RESULTS / "h200-x2-process-group.txt").read_text()
    date = re.search(r"^(\d{4}-\d\d-\d\d) ", text, re.MULTILINE)
    run = re.split(r"^ *(?:torchrun|python bench/run\.py) .*$", text, flags=re.MULTILINE)[1]
    times: dict[int, dict[str, list[str]]] = {}
    for size, name, *us in re.findall(
        r"^ *(\d+) (nccl beside|weft) +([\d.]+) +([\d.]+) +([\d.]+)", run, re.MULTILINE
    ):
        times.setdefault(int(size), {})[name] = us
    found = [
        [f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB"]
        + [f"{weft} ({nccl})" for nccl, weft in zip(of["nccl beside"], of["weft"], strict=True)]
        for n, of in times.items()
    ]
    assert date and found
    return _table(
        [
            f"2 H200, {date[1]}, microseconds, NCCL's in brackets",
            "host, eager",
            "GPU, eager",
            "in a CUDA graph",
        ],
        found,
    )


def _op_gains() -> dict[str, list[str]]:
    """How much faster each op is, by its names: over NCCL + cuBLAS, over torch's."""
    from_text = {
        "fused_all_gather_scaled_matmul": "gather",
        "fused_scaled_matmul_reduce_scatter": "scatter",
    }
    found = {}
    for names in OPS:
        public = names.split(",")[0].strip(" `")
        word = public.removeprefix("fused_").removeprefix("one_shot_")
        if public in from_text:
            gains = _scaled(from_text[public])
        elif word in ("all_reduce_rms_norm_quant", "gather"):  # no results
            gains = ["-", "-"]
        elif word in ("matmul_all_to_all", "all_to_all_matmul", "matmul_all_gather"):
            gains = _exchanged(word)
        else:
            gains = _against(_captured("h200-x2", word)[1])[:2]
        found[names] = gains
    return found


def ops_table() -> list[str]:
    """README's table: what each op replaces, and how much faster it is."""
    return _table(
        ["op", "replaces", "speed-up over NCCL + cuBLAS", "over `torch.ops.symm_mem`"],
        [[names, OPS[names], *gains] for names, gains in _op_gains().items()],
    )


def _op_bars(results: Path) -> str:
    """The picture of README's table."""
    found = {names.split(",")[0].strip(" `"): gains for names, gains in _op_gains().items()}
    rows = [(name, gains) for name, gains in found.items() if set(gains) != {"-"}]
    return gain_bars("Speed-up of weft's ops, 2 H200, bfloat16 and fp8 (higher is better)", rows)


OPS = {
    "`fused_all_gather_matmul`": "`all_gather(x) @ w` for one or more `w`",
    "`fused_matmul_reduce_scatter`": "`reduce_scatter(x @ w)`, with bias and residual",
    "`fused_all_gather_scaled_matmul`": "the same of fp8: `all_gather(x)` with its scales, `torch._scaled_mm`",
    "`fused_scaled_matmul_reduce_scatter`": "`reduce_scatter(torch._scaled_mm(x, w))`",
    "`fused_matmul_all_reduce`": "`all_reduce(x @ w)`",
    "`one_shot_all_reduce`, `one_shot_all_reduce_` (in place)": "`all_reduce(x)`",
    "`one_shot_all_gather`": "`all_gather(x)`",
    "`one_shot_reduce_scatter`": "`reduce_scatter(x)`",
    "`one_shot_all_to_all`": "`all_to_all_single(x)`, parts of any dimension joined along any",
    "`one_shot_gather`": "`gather(x)` to one rank",
    "`fused_matmul_all_to_all`": "`all_to_all_single(x @ w)`, heads to their ranks",
    "`fused_all_to_all_matmul`": "`all_to_all_single(x) @ w`, heads back to the sequence",
    "`fused_matmul_all_gather`": "`all_gather(x @ w)`, columns of all ranks",
    "`fused_all_reduce_rms_norm`": "`rms_norm(residual + all_reduce(x))`",
    "`fused_all_reduce_rms_norm_quant`": "the same in fp8, by a given scale or one of each row",
    "`fused_all_reduce_layer_norm`": "`layer_norm(residual + all_reduce(x))`",
}


def _exchanged(op: str) -> list[str]:
    name = "columns" if op == "matmul_all_gather" else "exchanges"
    content = json.loads((RESULTS / f"h200-x2-{name}.json").read_text())
    return [_mean([row for row in content["rows"] if row["op"] == op], "backend_us", "weft_us"), "-"]


def _scaled(op: str) -> list[str]:
    """Of fp8 operands with tensor-wise and row-wise scales: over NCCL and torch's product, over torch's fused op."""
    text = (RESULTS / "h200-x2-scaled.txt").read_text()
    row = rf"^\| {op} \| \S+ \| \d+ \| (?:tensor|rows) \| [\d.]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|"
    times = [tuple(map(float, us)) for us in re.findall(row, text, re.MULTILINE)]
    assert len(times) == {"gather": 36, "scatter": 35}[op], f"{op}: {len(times)} rows"
    return [_cell(geometric_mean(us[peer] / us[2] for us in times)) for peer in (0, 1)]


def _llama_rows() -> list[list[str]]:
    """Llama-3 8B, 8 layers, compiled without the pass and with it: milliseconds, and the speed-up."""
    # The newest run is the last one of its file.
    run = (RESULTS / "h100-x2-llama-whole-8192.txt").read_text()
    run = re.split(r"^python bench/(?:llama|run)\.py ", run, flags=re.MULTILINE)[-1]
    lines = re.findall(r"^train whole seq (\d+) batch 1 +(\w+) +([\d.]+)", run, re.MULTILINE)
    whole = {(int(seq), name): float(ms) for seq, name, ms in lines}
    found = [_llama_row(f"training, whole graph, sequence {n}", whole, n) for n in (4096, 8192)]
    for file, lengths in (("blocks-1024", (1024,)), ("blocks-4096-8192", (4096, 8192))):
        times = _llama_times(file, "seq")
        found += [_llama_row(f"training, block by block, sequence {n}", times, n) for n in lengths]
    found.append(_llama_row("decoding, batch 1, Inductor's CUDA graphs", _llama_times("decode", "batch"), 1))
    text = (RESULTS / "h100-x2-llama-decode-local.txt").read_text()
    for batch, plain, weft in re.findall(r"^\| (\d+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE):
        times = {(int(batch), "plain"): float(plain), (int(batch), "weft"): float(weft)}
        found.append(_llama_row(f"decoding, weights sharded by hand, batch {batch}", times, int(batch)))
    return found


def llama_table() -> list[str]:
    """Whole models."""
    return _table(["", "plain, ms", "with the pass, ms", "speed-up"], _llama_rows())


def _llama_bars(results: Path) -> str:
    """The picture of whole models."""
    rows = [(words, [gain]) for words, _, _, gain in _llama_rows()]
    return gain_bars("Speed-up of 8 layers of Llama-3 8B by the pass, 2 H100 (higher is better)", rows)


def _llama_times(file: str, size: str) -> dict[tuple[int, str], float]:
    """Milliseconds by size and contender."""
    rows = json.loads((RESULTS / f"h100-x2-llama-{file}.json").read_text())["rows"]
    return {(row[size], row["contender"]): row["ms"] for row in rows}


def _llama_row(words: str, times: dict[tuple[int, str], float], size: int) -> list[str]:
    plain, weft = times[size, "plain"], times[size, "weft"]
    digits = 3 if plain < 10 else 1
    return [words, _cell(plain, digits), _cell(weft, digits), _cell(plain / weft)]


TABLES: dict[str, Callable[[], list[str]]] = {
    f.__name__.removesuffix("_table"): f
    for f in (ops_table, layers_table, matmuls_table, collectives_table, process_group_table, llama_table)
}
_PLACE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(page: str) -> str:
    """The text of a page with its tables as the files have them."""
    return _PLACE.sub(lambda m: m[1] + "\n".join(TABLES[m[2]]()) + "\n" + m[3], page)


def _all_reduce(results: Path, machine: str) -> str:
    return chart(json.loads((results / f"{machine}-all_reduce.json").read_text()), "all_reduce")


PICTURES: dict[str, Callable[[Path], str]] = {
    "docs/layers-h100-x2.svg": layer_bars,
    "docs/layer-h100-x2.svg": layer_lanes,
    "docs/ops-h200-x2.svg": _op_bars,
    "docs/llama-h100-x2.svg": _llama_bars,
    **{
        f"docs/all-reduce-{machine}.svg": partial(_all_reduce, machine=machine)
        for machine in ("h200-x2", "h200-x4")
    },
}


class Pages(Suite):
    """The tables of figures in README.md and docs/benchmarks.md, and the pictures of docs/, from bench/results/.

    A table stands between ``<!-- figures: NAME -->`` and ``<!-- end -->``; ``NAME_table`` writes it. With --check it
    says which files differ, and changes nothing.
    """

    def add_options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--check", action="store_true")

    def rows(self, given: argparse.Namespace) -> tuple[str, ...]:
        placed = [name for page in PAGES for _, name, _ in _PLACE.findall((ROOT / page).read_text())]
        if sorted(placed) != sorted(TABLES):
            raise ValueError(f"the pages have the tables {placed}, must have each of {list(TABLES)} once")
        return (*PAGES, *PICTURES)

    def start(self, given: argparse.Namespace, arguments: list[str]) -> int:
        stale = 0
        for name in given.rows:
            old = (ROOT / name).read_text() if (ROOT / name).exists() else ""
            new = PICTURES[name](RESULTS) if name in PICTURES else with_tables(old)
            stale += new != old
            if new != old:
                print(f"{name}: differs from the files")
                if not given.check:
                    (ROOT / name).write_text(new)
        return int(given.check and stale > 0)


SUITE = Pages()
