"""Build the documentation as a site, of the pages in all folders and the docstrings of what users import.

It needs mkdocs-material and mkdocstrings. A link that leads nowhere fails the build.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

from ...engines import EngineError
from ..extras import install_command
from ..program import program

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDERS = ("export", "runtime", "engines", "tests", "tools")
REFERENCE = {  # what users import, by its page
    "runtime": ("trt_spec.runtime", "What a service embeds: open a bundle, submit requests, step."),
    "engines": ("trt_spec.engines", "Bundles, contracts, engines and errors."),
    "export": ("trt_spec.export", "From checkpoints to a bundle."),
}
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write the site into")


def run(arguments: argparse.Namespace) -> int:
    for module, package in (("material", "mkdocs-material"), ("mkdocstrings_handlers", "mkdocstrings")):
        if find_spec(module) is None:
            raise EngineError(f"the site needs {package}, which is not installed; {install_command('docs')}")
    with TemporaryDirectory() as folder:
        gather(Path(folder))
        command = build_command(sys.executable, Path(folder), arguments.out.resolve())
        return subprocess.run(command, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}).returncode


def build_command(python: Path | str, folder: Path, out: Path) -> list[str]:
    return [str(python), "-m", "mkdocs", "build", "-f", f"{folder}/mkdocs.yml", "-d", str(out)]


def gather(folder: Path) -> None:
    """Lay out what mkdocs reads: the pages and all that they link to, the reference, and its code."""
    pages = [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
    for page in pages:
        linked = [page.parent / link for link in LINK.findall(page.read_text(encoding="utf-8"))]
        for file in (page, *(file for file in linked if file.is_file())):
            place = folder / "docs" / file.resolve().relative_to(ROOT)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, place)
    (folder / "docs" / "reference").mkdir()
    for name, (module, about) in REFERENCE.items():
        (folder / "docs" / "reference" / f"{name}.md").write_text(f"# {module}\n\n{about}\n\n::: {module}\n")
    shutil.copy(HERE / "mkdocs.yml", folder)
    (folder / ".package").symlink_to(ROOT / ".package")


main = program("trt_spec.tools.research.site", __doc__, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
