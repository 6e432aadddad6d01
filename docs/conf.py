"""The site of the documentation: ``make docs``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import weft
from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).parent))
import notebooks

project = "weft"
author = project_copyright = "The weft authors"
release = weft.__version__

extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "myst_parser", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"weft {release}"
html_static_path = ["_static"]
html_css_files = ["weft.css"]
html_theme_options = {"source_branch": "main", "source_directory": "docs/"}
# Links to edit each page, once [project.urls] says where the repository is.
if url := re.search(
    r'^Repository = "(.+)"$', (Path(__file__).parents[1] / "pyproject.toml").read_text(), re.M
):
    html_theme_options["source_repository"] = url[1]
highlight_language = "none"  # what has no language is no Python
myst_heading_anchors = 3
smartquotes_action = "D"  # dashes alone: [..., K] stays that

autodoc_member_order = "bysource"
autodoc_type_aliases = {"Group": "Group"}
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_use_ivar = True  # a dataclass's fields are listed once
napoleon_use_rtype = False

_KINDS = {"py": "program", "ipynb": "notebook"}
_LINK = re.compile(r"(?P<text>(?<!!)\[[^\]]*\])\((?P<path>\.\./[^)#\s]*)(#[^)\s]*)?\)")


def _download_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Links to files of the repository outside docs/ give the file; one that is not there is a warning."""
    folder = Path(app.env.doc2path(docname)).parent

    def link(match: re.Match[str]) -> str:
        inside = (folder / match["path"]).resolve().is_relative_to(Path(app.srcdir).resolve())
        return match[0] if inside else f"{match['text']}(path:{match['path']})"

    source[0] = _LINK.sub(link, source[0])


def _link_program(app: Sphinx, docname: str, source: list[str]) -> None:
    """Below the title of a page of the tutorial."""
    name = docname.removeprefix("tutorial/")
    if docname in {f"tutorial/{page.stem}" for page in notebooks.PAGES}:
        links = (f'<a href="{name}.{kind}" download>{text}</a>' for kind, text in _KINDS.items())
        source[0] = source[0].replace("\n\n", f"\n\nDownload the {' or the '.join(links)}.\n\n", 1)


def _write_programs(app: Sphinx, error: Exception | None) -> None:
    notebooks.write_all(Path(app.outdir) / "tutorial")


def setup(app: Sphinx) -> None:
    app.connect("source-read", _download_files)
    app.connect("source-read", _link_program)
    app.connect("build-finished", _write_programs)
