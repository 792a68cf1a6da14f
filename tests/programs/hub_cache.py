# Copyright (c) the torchtitan-grpo authors.
# SPDX-License-Identifier: BSD-3-Clause

"""Makes a cache of the Hugging Face Hub, as huggingface_hub lays it out."""

import hashlib
import os
from pathlib import Path

REVISION = "0123456789abcdef0123456789abcdef01234567"


def fill_cache(home: Path, repo: str, model: Path, revision: str = REVISION) -> Path:
    """Puts the files of a model directory into the cache below ``HF_HOME``; returns the snapshot.

    The content lies in ``blobs`` under its hash, a snapshot holds links to it, and ``refs/main`` names
    the snapshot of the main branch.
    """
    folder = home / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    for part in (folder / "blobs", folder / "refs", snapshot):
        part.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        blob = folder / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        blob.write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(os.path.relpath(blob, snapshot))
    (folder / "refs" / "main").write_text(revision)
    return snapshot
