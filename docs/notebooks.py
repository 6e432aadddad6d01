"""Each page of the tutorial as a program and as a notebook: ``python docs/notebooks.py FOLDER`` writes both.

A page's blocks of Python are its program. A notebook is one process, and the program runs on two ranks: so each cell
writes its part of the program's file, and the command that starts the ranks is the last one.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

PAGES = sorted((Path(__file__).parent / "tutorial").glob("[0-9]*.md"))
_BLOCK = re.compile(r"^```(python|console)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def program_of(page: Path) -> str:
    return "".join(block for language, block in _BLOCK.findall(page.read_text()) if language == "python")


def notebook_of(page: Path) -> dict[str, Any]:
    """In Jupyter's format 4.4."""
    cells: list[dict[str, Any]] = []

    def add_prose(text: str) -> None:
        cells.append({"cell_type": "markdown", "metadata": {}, "source": text.strip()})

    prose, *blocks = _BLOCK.split(page.read_text())
    add_prose(prose)
    write = "%%writefile"
    for language, block, prose in zip(blocks[::3], blocks[1::3], blocks[2::3], strict=True):
        source = f"{write} {page.stem}.py\n{block}" if language == "python" else f"!{block}"
        write = "%%writefile -a"
        code = {"execution_count": None, "metadata": {}, "outputs": [], "source": source.strip("\n")}
        cells.append({"cell_type": "code", **code})
        add_prose(prose)
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 4}


def write_all(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        (folder / f"{page.stem}.py").write_text(program_of(page))
        (folder / f"{page.stem}.ipynb").write_text(json.dumps(notebook_of(page), indent=1))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("python docs/notebooks.py FOLDER")
    write_all(Path(sys.argv[1]))
