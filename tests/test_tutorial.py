"""The pages of docs/tutorial run as they are printed, print what they show, and do so as notebooks."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from torchrun import run_program

sys.path.append(str(Path(__file__).parents[1] / "docs"))
from notebooks import PAGES, notebook_of, program_of, write_all

OFFLINE = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def lines_of(text: str) -> list[str]:
    """Without what differs from run to run: times, which have a point, and the width of columns."""
    return [" ".join(re.sub(r"\d+\.\d+", "0.0", line).split()) for line in text.splitlines()]


def not_printed(page: str, printed: str) -> list[list[str]]:
    """The blocks of output on the page of which a line was not printed."""
    lines = lines_of(printed)
    shown = re.findall(r"^```text\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [block for block in map(lines_of, shown) if not block or not set(block) <= set(lines)]


def check_printed(page: Path, printed: str) -> None:
    # A framework that is not installed has no output.
    assert len(not_printed(page.read_text(), printed)) <= printed.count("skipped: "), printed


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_runs_and_prints_what_it_shows(page: Path, tmp_path: Path) -> None:
    program = tmp_path / f"{page.stem}.py"
    program.write_text(program_of(page))
    done = run_program(program, 2, env=OFFLINE, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "False" not in done.stdout, done.stdout
    check_printed(page, done.stdout)


def test_output_that_is_not_printed_is_found() -> None:
    page = "```text\nas the whole model: True\nmatmuls 1.5 ms\n```\n```text\n4 of 4\n```\n"
    assert not_printed(page, "matmuls  2.25 ms\nas the whole model: True\n3 of 4\n") == [["4 of 4"]]


def test_a_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of them: what the cells of each page write is its program, which the tests above and below see."""
    nbclient = pytest.importorskip("nbclient")
    import nbformat

    (page,) = (page for page in PAGES if page.stem == "4_layers")
    notebook = nbformat.from_dict(notebook_of(page))
    nbformat.validate(notebook)
    # torchrun is found as in an environment that is activated; another program may have its usual port.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    here = {"PET_STANDALONE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    for name, value in {**OFFLINE, **here}.items():
        monkeypatch.setenv(name, value)
    nbclient.execute(notebook, cwd=tmp_path, timeout=200)
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    # A notebook shows stderr, too, where the profiler writes, also within a line.
    printed = re.sub(r"USDT:.*?profiler_(start|stop)", "\n", "".join(output.text for output in outputs))
    check_printed(page, printed)
    assert (tmp_path / f"{page.stem}.py").read_text() == program_of(page)


def test_every_page_is_written_as_a_program_and_as_a_notebook(tmp_path: Path) -> None:
    write_all(tmp_path)
    for page in PAGES:
        program = (tmp_path / f"{page.stem}.py").read_text()
        cells: list[dict[str, Any]] = json.loads((tmp_path / f"{page.stem}.ipynb").read_text())["cells"]
        code = [cell["source"].partition("\n") for cell in cells if cell["cell_type"] == "code"]
        assert code.pop()[0] == f"!torchrun --nproc-per-node 2 {page.stem}.py"
        assert [first for first, _, _ in code] == [
            f"%%writefile{' -a' * (i > 0)} {page.stem}.py" for i in range(len(code))
        ]
        assert "\n".join(rest for _, _, rest in code).split() == program.split()


def test_the_index_names_every_page() -> None:
    index = PAGES[0].with_name("index.md").read_text()
    for page in PAGES:
        title = page.read_text().splitlines()[0].removeprefix("# ")
        assert f"[{title}]({page.name})" in index and f"\n{page.stem}\n" in index
