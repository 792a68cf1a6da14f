# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""The commit of this package's source, also where the repository is not at hand."""

import json
import os
import subprocess
from importlib import metadata
from pathlib import Path

COMMIT_VARIABLE = "TORCHTITAN_GRPO_COMMIT"
"""Environment variable that names the commit of a source that was copied without its repository."""
_GIT_SECONDS = 5.0


def source_commit() -> str | None:
    """Returns the commit from git, from :data:`COMMIT_VARIABLE`, or from pip's record."""
    folder = Path(__file__).resolve().parents[1]
    return git_commit(folder) or os.environ.get(COMMIT_VARIABLE) or _installed_commit()


def git_commit(folder: Path) -> str | None:
    """Returns the commit of the source, with ``-dirty`` if files differ from it.

    Returns None if ``folder`` is in no repository, as in an installed package.
    """
    # An installed package may lie in somebody else's repository, which does not track it.
    if not _git(folder, "ls-files", "__init__.py"):
        return None
    # Without tags, the description is the commit itself and not its distance from a tag.
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True, text=True, timeout=_GIT_SECONDS,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None


def _installed_commit() -> str | None:
    """Returns the commit that pip has recorded if the package was installed from a repository's URL."""
    try:
        record = metadata.distribution("torchtitan-grpo").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        return None
    return json.loads(record or "{}").get("vcs_info", {}).get("commit_id")
