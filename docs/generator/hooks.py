# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Hooks of mkdocs: the site is the repository's tree, reduced to what its pages link to.

The pages are the README, those of ``docs``, and every file to which they link. Each keeps its path,
so that the links of the repository are those of the site, and mkdocs checks all of them. A file that
is not Markdown becomes a page that shows its text. ``llms.txt`` lists the pages for language models
(https://llmstxt.org), and the text of each page lies beside it.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from jinja2 import Environment
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

HOW_TO = "docs/how-to/README.md"
PROJECT = (
    "benchmarks/RESULTS.md", "torchtitan/grpo/README.md", "CONTRIBUTING.md", "CHANGELOG.md",
)  # fmt: skip
PARTS_OF_THE_SITE = ("docs/generator/site.css",)
SHOWN = {".py": "python", ".toml": "toml", ".sh": "bash", "": "text"}  # as a page, in its language


class Entry(NamedTuple):
    """A page in a list of pages."""

    path: str  # in the repository
    about: str


class TextFile(File):
    """A file whose page shows its text: ``critic.py.html`` for ``critic.py``."""

    def is_documentation_page(self) -> bool:
        return True

    @property
    def name(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return PurePosixPath(self.src_uri).name

    @property
    def content_string(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        language, fence = SHOWN[PurePosixPath(self.src_uri).suffix], "`" * 8
        head = f"---\ntitle: {self.src_uri}\nsearch: {{exclude: true}}\n---\n# `{self.src_uri}`\n"
        return f"{head}\n{fence}{language}\n{super().content_string}\n{fence}\n"


def on_config(config: MkDocsConfig) -> None:
    lists = _lists(_root(config))
    nav = [{name: [entry.path for entry in entries]} for name, entries in lists.items()]
    config.nav = [{"Overview": "README.md"}, {"How to": [HOW_TO, *nav[1:-2]]}, *nav[-2:]]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = _root(config)
    of_theme = [file for file in files if file.src_dir != config.docs_dir]
    pages = [f"docs/{file.src_uri}" for file in files if file.src_uri.endswith(".md")]
    found = Files(of_theme)
    waiting = ["README.md", *PROJECT, *pages, *PARTS_OF_THE_SITE]
    while waiting:
        path = waiting.pop()
        # mkdocs itself reports links to what does not exist.
        if found.get_file_from_path(path) or not (root / path).is_file():
            continue
        if PurePosixPath(path).suffix in SHOWN:
            kind, inclusion = TextFile, InclusionLevel.NOT_IN_NAV
        else:
            kind, inclusion = File, InclusionLevel.INCLUDED
        found.append(kind(path, str(root), config.site_dir, False, inclusion=inclusion))
        if path.endswith(".md"):
            waiting += _links(root, path)
    return found


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Indents what belongs to ``1. item`` by 4 spaces, which this Markdown needs, instead of 3."""
    if isinstance(page.file, TextFile):
        return markdown
    lines, in_list = [], False
    for line in markdown.splitlines():
        inside = line.startswith("   ")
        in_list = bool(re.match(r"\d\. ", line)) or (in_list and (inside or not line))
        lines.append(f" {line}" if in_list and inside else line)
    return "\n".join(lines)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lets a browser break the names of metrics and files at a slash, so that tables fit."""
    inside = r"(?<=<code>)[^<]+(?=</code>)"
    return re.sub(inside, lambda code: re.sub(r"(?<=[\w}])/", "/<wbr>", code[0]), html)


def on_env(env: Environment, config: MkDocsConfig, files: Files) -> None:
    """Writes the text of each page, and ``llms.txt``."""
    root, site = _root(config), Path(config.site_dir)
    for file in files.documentation_pages():
        (site / file.src_uri).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file.src_uri, site / file.src_uri)
    summary = (root / "README.md").read_text().split("\n\n")[1]  # below the title
    summary = re.sub(r"\[([^]]+)]\([^)]+\)", r"\1", summary).replace("\n", " ")
    lines = [f"# {config.site_name}", "", f"> {summary}"]
    for section, entries in _lists(root).items():
        lines += ["", f"## {section}", ""]
        for path, about in entries:
            page = files.src_uris[path].page
            assert page is not None
            lines.append(f"- [{page.title}]({path})" + (f": {about}" if about else ""))
    (site / "llms.txt").write_text("\n".join(lines) + "\n")


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Names the page's text, which lies beside it."""
    text = PurePosixPath(page.file.src_uri)
    kind = "text/markdown" if text.suffix == ".md" else "text/plain"
    link = f'<link rel="alternate" type="{kind}" href="{text.name}">'
    return output.replace("</head>", f"{link}</head>", 1)


def _root(config: MkDocsConfig) -> Path:
    return Path(config.config_file_path).resolve().parent


def _links(root: Path, page: str) -> list[str]:
    """The files of the repository to which a page links, as paths in it."""
    targets = re.findall(r"\]\(([^)\s#:]+)(?:#[^)\s]*)?\)", (root / page).read_text())
    files = [((root / page).parent / target).resolve() for target in targets]
    return [file.relative_to(root).as_posix() for file in files if file.is_relative_to(root)]


def _lists(root: Path) -> dict[str, list[Entry]]:
    """The pages by their sections: as in the list of how-to pages, and as in that of the README."""
    readme, how_to = (root / "README.md").read_text(), (root / HOW_TO).read_text()
    found = {"Overview": [Entry("README.md", ""), Entry(HOW_TO, "")]}
    for name, table in re.findall(r"^\*\*(.+)\*\*\n\n((?:\|.*\n)+)", how_to, re.MULTILINE):
        rows = [
            e for e in _entries(table, "docs/how-to/") if not e.path.startswith("docs/how-to/..")
        ]
        known = {entry.path for entries in found.values() for entry in entries}
        found[name] = [entry for entry in rows if entry.path not in known]
    table = readme.partition("\n## Documentation\n")[2]
    found["Reference"] = [entry for entry in _entries(table, "") if entry.path != HOW_TO]
    found["Project"] = [Entry(path, "") for path in PROJECT]
    return found


def _entries(table: str, folder: str) -> Iterator[Entry]:
    """The rows of a table of links and subjects; a row may have several of both."""
    for cells in re.findall(r"^\| (\[.+\)) \| (.+) \|$", table, re.MULTILINE):
        paths = re.findall(r"\]\(([^)#]+)", cells[0])
        subjects = cells[1].split("; ") if len(paths) > 1 else [cells[1]]
        if len(subjects) != len(paths):
            subjects = [cells[1]] * len(paths)
        yield from (Entry(folder + path, text) for path, text in zip(paths, subjects, strict=True))
