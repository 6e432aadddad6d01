"""The site that ``make docs`` builds: links, pictures, pages that nothing leads to, what is wider than the screen."""

from __future__ import annotations

import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parent.parent
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
WIDTHS = (1500, 1280, 1000, 400)  # pixels
GENERATED = {"search.html", "genindex.html"}  # by Sphinx


class Page(HTMLParser):
    """What a page has, and what it asks for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.files: list[str] = []
        self.faults: list[str] = []
        self._open: list[str] = []  # the classes of elements around
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given["id"]} if "id" in given else set()
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        if (tag in ("img", "script") and "src" in given) or tag == "link":
            self.files.append(given.get("src") or given.get("href", ""))
        if tag == "img" and not given.get("alt") and "sidebar-logo" not in given.get("class", ""):
            self.faults.append(f"{given.get('src')}: a picture without words")
        if tag == "table" and not any("table-wrapper" in classes for classes in self._open):
            self.faults.append("a table that would not scroll")
        if tag == "div":
            self._open.append(given.get("class", ""))

    def handle_endtag(self, tag: str) -> None:
        if tag == "div":
            self._open.pop()


def broken(site: Path) -> list[str]:
    """What is wrong with the pages of a site."""
    pages = {file: Page(file.read_text()) for file in sorted(site.rglob("*.html"))}
    found, reached, ahead = [], set(), [site / "index.html"]
    while ahead:
        if (file := ahead.pop()) not in reached and file in pages:
            reached.add(file)
            ahead += [there for link in pages[file].links if (there := _target(file, link)[0])]
    for file, page in pages.items():
        name = str(file.relative_to(site))
        if name not in GENERATED:
            found += [f"{name}: {fault}" for fault in page.faults]
            found += [f"{name}: no page leads there"] if file not in reached else []
        for link in [*page.links, *page.files]:
            there, anchor = _target(file, link)
            if there is not None and not there.exists():
                found.append(f"{name}: {link} is not there")
            elif there in pages and anchor and anchor not in pages[there].ids:
                found.append(f"{name}: {link} has no such place")
    return found


def _target(page: Path, link: str) -> tuple[Path | None, str]:
    """The file that a link leads to, None outside of the site; and the place in it."""
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return None, ""
    return (page.parent / unquote(parts.path)).resolve() if parts.path else page, unquote(parts.fragment)


def test_the_site(tmp_path: Path) -> None:
    pytest.importorskip("sphinx_copybutton", reason="the site wants pip install -e '.[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet"]
    done = subprocess.run(
        [*command, ROOT / "docs", site], timeout=280, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(list(site.rglob("*.html"))) > 15
    found = broken(site)
    if BROWSER is not None:  # CI installs none
        found += too_wide(site, tmp_path / "frames.html")
    assert not found, "\n".join(found)


def test_pages_can_be_edited_where_the_repository_is_known(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("conf.py", "notebooks.py"):
        shutil.copy(ROOT / "docs" / name, docs)
    project = (ROOT / "pyproject.toml").read_text().split("[project.urls]")[0]
    url = "https://example.org/of/weft"
    for added, options in (("", {}), (f'[project.urls]\nRepository = "{url}"\n', {"source_repository": url})):
        (tmp_path / "pyproject.toml").write_text(project + added)
        found = runpy.run_path(str(docs / "conf.py"))["html_theme_options"]
        assert found == {"source_branch": "main", "source_directory": "docs/", **options}


@pytest.mark.parametrize(
    ("added", "fault"),
    [
        ('<a href="gone.html">', "index.html: gone.html is not there"),
        ('<a href="a.html#gone">', "index.html: a.html#gone has no such place"),
        ('<a href="#gone">', "index.html: #gone has no such place"),
        ('<img src="gone.svg" alt="a picture">', "index.html: gone.svg is not there"),
        ('<img src="a.html">', "index.html: a.html: a picture without words"),
        ("<table>", "index.html: a table that would not scroll"),
    ],
)
def test_what_is_broken_is_found(added: str, fault: str, tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<h1 id="here"></h1>')
    right = '<a href="a.html#here">a</a> <a href="https://pytorch.org/gone">b</a>'
    (tmp_path / "index.html").write_text(
        f'{right} <div class="table-wrapper"><div></div><table></table></div>'
    )
    assert broken(tmp_path) == []
    (tmp_path / "index.html").write_text(f"{right} {added}")
    assert broken(tmp_path) == [fault]


def test_a_page_that_nothing_leads_to_is_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text("")
    (tmp_path / "a.html").write_text('<a href="index.html">')
    assert broken(tmp_path) == ["a.html: no page leads there"]


# Each page in a frame of some width; what is wider than it goes into the title.
FRAMES = """<!doctype html><body><script>
const found = [];
async function look(page, width) {
  const frame = document.createElement("iframe");
  frame.style = `border: 0; height: 900px; width: ${width}px`;
  frame.src = page;
  document.body.append(frame);
  await new Promise(then => frame.onload = then);
  const { documentElement: root, images } = frame.contentDocument;
  if (root.scrollWidth > width) found.push(`${page} is ${root.scrollWidth} pixels wide, of ${width}`);
  for (const image of images) if (!image.naturalWidth) found.push(`${page}: ${image.src} is no picture`);
  frame.remove();
}
(async () => {
  for (const page of PAGES) for (const width of WIDTHS) await look(page, width);
  document.title = "all looked at";
  document.body.textContent = JSON.stringify(found);
})();
</script>"""


def too_wide(site: Path, frames: Path) -> list[str]:
    """What a browser finds wider than the screen, or no picture."""
    pages = [file.as_uri() for file in sorted(site.rglob("*.html"))]
    frames.write_text(FRAMES.replace("PAGES", json.dumps(pages)).replace("WIDTHS", json.dumps(WIDTHS)))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files"]
    command += [
        "--virtual-time-budget=60000",
        f"--user-data-dir={frames.parent}",
        "--dump-dom",
        frames.as_uri(),
    ]
    environment = {**os.environ, "HOME": str(frames.parent)}
    said = subprocess.run(
        command, timeout=280, capture_output=True, text=True, check=False, env=environment
    ).stdout
    assert "<title>all looked at</title>" in said, said[-2000:]
    found: list[str] = json.loads(re.findall(r"(\[.*\])</body>", said, re.DOTALL)[0].replace("&gt;", ">"))
    return found


@pytest.mark.skipif(BROWSER is None, reason="wants chromium, which CI does not install")
def test_a_page_that_is_too_wide_is_found(tmp_path: Path) -> None:
    pages = tmp_path / "site"
    pages.mkdir()
    (pages / "a.html").write_text('<div style="width: 700px">wide</div><img src="gone.png" alt="gone">')
    found = too_wide(pages, tmp_path / "frames.html")
    names = sorted(line.split("/")[-1] for line in found)
    assert names == ["a.html is 708 pixels wide, of 400", *["gone.png is no picture"] * len(WIDTHS)]
