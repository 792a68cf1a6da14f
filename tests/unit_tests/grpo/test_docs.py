"""Pages that are made from the code are up to date."""

import re
import subprocess
import sys


def test_the_configuration_page_says_what_the_code_says(repository):
    script = repository / "scripts/make_configuration_doc.py"
    result = subprocess.run([sys.executable, str(script), "--check"], timeout=60)
    assert result.returncode == 0, "run python scripts/make_configuration_doc.py"


def test_no_page_or_configuration_has_a_gap_left_to_fill(repository):
    pages = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    for file in [*pages, *repository.glob("train_configs/*.toml")]:
        assert not re.search(r"@[A-Z0-9]+@", file.read_text()), file.name
