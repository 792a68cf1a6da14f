"""Pages that are made from the code are up to date."""

import subprocess
import sys


def test_the_configuration_page_says_what_the_code_says(repository):
    script = repository / "scripts/make_configuration_doc.py"
    result = subprocess.run([sys.executable, str(script), "--check"], timeout=60)
    assert result.returncode == 0, "run python scripts/make_configuration_doc.py"
