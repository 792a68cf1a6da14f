"""Pages that are made from the code are up to date."""

import re
import subprocess
import sys
from pathlib import Path


def test_the_configuration_page_says_what_the_code_says(repository):
    script = repository / "scripts/make_configuration_doc.py"
    result = subprocess.run([sys.executable, str(script), "--check"], timeout=60)
    assert result.returncode == 0, "run python scripts/make_configuration_doc.py"


def test_no_page_or_configuration_has_a_gap_left_to_fill(repository):
    pages = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    for file in [*pages, *repository.glob("train_configs/*.toml")]:
        assert not re.search(r"@[A-Z0-9]+@", file.read_text()), file.name


def _pages(repository: Path) -> list[Path]:
    packages = repository / "torchtitan/grpo"
    found = [*repository.glob("*.md"), *repository.glob("docs/**/*.md"), *packages.glob("**/*.md")]
    return sorted([*found, *repository.glob("benchmarks/*.md")])


def _anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_links_between_pages_lead_somewhere(repository):
    broken = []
    for page in _pages(repository):
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if target.startswith(("http://", "https://")):
                continue
            path, _, anchor = target.partition("#")
            file = (page.parent / path).resolve() if path else page
            if not file.exists() or (anchor and anchor not in _anchors(file)):
                broken.append(f"{page.relative_to(repository)}: {target}")
    assert not broken, broken


def test_files_that_pages_name_exist(repository):
    """Names in backticks that look like Python files of this repository, such as ``data/rows.py``.

    The pages of ``docs/how-to`` name files that their readers are about to write.
    """
    folders = ("torchtitan", "tests", "benchmarks", "scripts")
    files = [str(file) for folder in folders for file in (repository / folder).rglob("*.py")]
    files += [str(file) for file in repository.glob("*.py")]
    unknown = []
    for page in _pages(repository):
        if page.parent.name == "how-to":
            continue
        text = re.sub(r"^(```|~~~).*?^\1", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        for name in re.findall(r"`([\w/]+\.py)`", text):
            if not any(file.endswith("/" + name) for file in files):
                unknown.append(f"{page.relative_to(repository)}: {name}")
    assert not unknown, unknown


def test_the_first_commands_of_the_readme_can_be_pasted(repository):
    quickstart = (repository / "README.md").read_text().partition("## Quickstart")[2]
    block = re.search(r"(?:^    .+\n)+", quickstart, re.MULTILINE)
    assert block is not None
    commands = [line.strip() for line in block[0].splitlines()]
    assert commands == ["bash scripts/quickstart.sh"]
    assert (repository / "scripts/quickstart.sh").is_file()
