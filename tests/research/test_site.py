"""The site is built of all pages, and a link that leads nowhere fails it."""

import os
import subprocess
from pathlib import Path

import pytest
from trt_spec.tools.extras import requirements
from trt_spec.tools.research.site import build_command, gather

from ..tools.serving.clients.installed import environment

pytestmark = pytest.mark.research

PINNED = ("mkdocs-material==9.8.2", "mkdocstrings[python]==1.0.8")


def test_the_site_is_built_and_a_dead_link_fails_it(tmp_path: Path):
    python = environment("docs", *PINNED) / "python"
    assert {pin.partition("==")[0].partition("[")[0] for pin in PINNED} == set(requirements()["docs"])

    def build() -> subprocess.CompletedProcess[str]:
        command = build_command(python, tmp_path, tmp_path / "site")
        return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})

    gather(tmp_path)
    done = build()
    assert done.returncode == 0, done.stderr
    assert "Decodes many requests together" in (tmp_path / "site" / "reference" / "runtime" / "index.html").read_text()
    assert (tmp_path / "site" / "tools" / "pages" / "bench.svg").is_file()
    for page, link in (("README.md", "[a](tools/none.md)"), ("tools/docs/drafts.md", "[a](figures.md#none)")):
        text = (tmp_path / "docs" / page).read_text()
        (tmp_path / "docs" / page).write_text(f"{text}\n{link}\n")
        assert build().returncode != 0, link
        (tmp_path / "docs" / page).write_text(text)
