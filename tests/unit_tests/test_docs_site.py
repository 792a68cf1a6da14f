"""The documentation as a site: ``mkdocs.yml`` and ``docs/generator``."""

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt

PROJECT = {
    "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/RESULTS.md", "torchtitan/grpo/README.md",
}  # fmt: skip
LOADING = {"link": "href", "object": "data", "video": "poster"}  # beside src, of any element
COUNTED = ("h1", "h2", "h3", "h4", "li", "ul", "ol", "table", "td", "pre", "code", "a", "img")


class _Html(HTMLParser):
    """What the tests read in a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: Counter[str] = Counter()
        self.ids: set[str] = set()
        self.targets: set[str] = set()  # of links, and what is loaded
        self.loaded: set[str] = set()
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.elements[tag] += 1
        self.ids.add(values.get("id", ""))
        self.loaded |= {values.get("src", ""), values.get(LOADING.get(tag, ""), "")} - {""}
        self.targets |= {values.get("src", ""), values.get("href", "")} - {""}

    def handle_data(self, data: str) -> None:
        self.text += "".join(data.split())


def _build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # The theme would print that mkdocs 2 will not be what mkdocs 1 is.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", site]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)


def _html_of(text: Path) -> Path:
    """The page that shows a file."""
    if text.suffix != ".md":
        return text.with_name(f"{text.name}.html")
    return text.with_name("index.html" if text.name == "README.md" else f"{text.stem}.html")


def _article(html: str) -> str:
    article = html.partition("<article")[2].partition(">")[2].partition("</article>")[0]
    return re.sub(r'<a class="headerlink".*?</a>', "", article)


def test_the_site_has_every_page_and_needs_nothing_else(repository: Path, tmp_path: Path) -> None:
    result = _build(repository / "mkdocs.yml", tmp_path)
    assert result.returncode == 0, result.stderr
    pages = {f.relative_to(repository).as_posix() for f in repository.glob("docs/**/*.md")}
    pages |= {"README.md"} | PROJECT
    _check_texts(repository, tmp_path, pages)
    read = {file: _Html(file.read_text()) for file in tmp_path.rglob("*.html")}
    _check_targets(tmp_path, read)
    for page in pages:
        _check_rendering(page, repository / page, _html_of(tmp_path / page))


def _check_texts(repository: Path, site: Path, pages: set[str]) -> None:
    """``llms.txt`` lists the pages, and the text of each page lies beside it."""
    lines = (site / "llms.txt").read_text().splitlines()
    assert lines[0] == "# torchtitan-grpo"
    assert lines[2].startswith("> torchtitan-grpo trains language models")
    listed = re.findall(r"^- \[.+?\]\((.+?)\)(?:: .+)?$", "\n".join(lines), re.MULTILINE)
    assert sorted(listed) == sorted(pages)
    texts = {_html_of(file) for file in site.rglob("*") if file.suffix not in (".html", ".js")}
    others = {site / "404.html", *(site / "docs/reports").glob("*.html")}
    assert set(site.rglob("*.html")) - others <= texts
    for page in pages:
        assert (site / page).read_bytes() == (repository / page).read_bytes()


def _check_targets(site: Path, pages: dict[Path, _Html]) -> None:
    """Links and their anchors lead to parts of the site, and nothing is loaded from elsewhere."""
    broken = []
    for file, page in pages.items():
        elsewhere = [t for t in page.loaded if re.match(r"(\w+:)?//", t)]
        assert not elsewhere, (file.name, elsewhere)
        for target in page.targets:
            path, _, anchor = unquote(target).partition("#")
            if re.match(r"\w+:", path) or file.name == "404.html":  # which may stand for any page
                continue
            other = (file.parent / path).resolve() if path else file
            if not other.exists() or (anchor and anchor not in pages[other].ids):
                broken.append(f"{file.relative_to(site)}: {target}")
    assert not broken, broken
    for style in site.rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), style


def _check_rendering(name: str, source: Path, html: Path) -> None:
    """mkdocs reads a page as CommonMark does, which the repository's pages are written for."""
    shown = _Html(_article(html.read_text()))
    meant = _Html(MarkdownIt("commonmark").enable("table").render(source.read_text()))
    assert shown.text == meant.text, name
    counts = [{tag: page.elements[tag] for tag in COUNTED} for page in (shown, meant)]
    assert counts[0] == counts[1], name


def test_a_fault_of_a_page_fails_the_build(repository: Path, tmp_path: Path) -> None:
    head = "\n\n| page | subject |\n|---|---|\n"
    pages = dict.fromkeys(PROJECT, "# A page\n") | {
        "README.md": f"# A\n\nSummary.\n\n## Documentation{head}| [losses](docs/losses.md) | all |\n",
        "docs/how-to/README.md": f"# How to\n\n**Start**{head}| [rewards](rewards.md) | begin |\n",
        "docs/how-to/rewards.md": "# Rewards\n\n## A part\n",
        "docs/losses.md": "# Losses\n\n[part](how-to/rewards.md#a-part), [code](../code.py)\n",
        "code.py": "print(1)\n",
    }
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    shutil.copytree(repository / "docs/generator", tmp_path / "docs/generator")
    shutil.copy(repository / "mkdocs.yml", tmp_path)
    config, site = tmp_path / "mkdocs.yml", tmp_path / "site"
    result = _build(config, site)
    assert result.returncode == 0, result.stderr

    (tmp_path / "docs/glossary.md").write_text("# A page in no list\n")
    links = "gone.md ../gone.py gone.png how-to/rewards.md#gone #gone-too /losses.md"
    faults = links.split()
    (tmp_path / "docs/losses.md").write_text("# Losses\n\n" + " ".join(f"[a]({f})" for f in faults))
    result = _build(config, site)
    assert result.returncode != 0
    warnings = [line for line in result.stderr.splitlines() if line.startswith("WARNING")]
    assert len(warnings) == len(faults) + 1, result.stderr
    for fault in faults:
        assert any(f"'{fault}'" in line for line in warnings), (fault, result.stderr)
    assert "docs/glossary.md" in result.stderr
