"""Pages that are made from the code are up to date."""

import re
import runpy


def test_the_configuration_page_says_what_the_code_says(repository):
    # In this process, which has imported torchtitan already.
    script = runpy.run_path(str(repository / "scripts/make_configuration_doc.py"))
    page = (repository / "docs/configuration.md").read_text()
    assert page == script["page"](), "run python scripts/make_configuration_doc.py"


def test_no_page_or_configuration_has_a_gap_left_to_fill(repository):
    pages = [*repository.glob("*.md"), *repository.glob("docs/*.md")]
    for file in [*pages, *repository.glob("train_configs/*.toml")]:
        assert not re.search(r"@[A-Z0-9]+@", file.read_text()), file.name
