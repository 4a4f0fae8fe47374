"""The README of a folder names only files that exist."""

import fnmatch
import re

NAMED = re.compile(r"`([\w*]+\.py)`")


def readmes(root):
    return sorted(root.glob("packages/*/src/**/README.md"))


def named_in(readme):
    """Return the file names in backticks, and patterns of them such as `*_programs.py`."""
    return set(NAMED.findall(readme.read_text(encoding="utf-8")))


def test_every_file_that_a_readme_names_exists(root):
    everywhere = {path.name for path in root.rglob("packages/**/*.py")} | {p.name for p in root.glob("*/*.py")}
    missing = [
        f"{readme.relative_to(root)}: {name}"
        for readme in readmes(root)
        for name in sorted(named_in(readme))
        if not fnmatch.filter(everywhere, name)
    ]
    assert not missing, "\n".join(missing)
