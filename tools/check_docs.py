"""Check the Markdown pages: links and named paths exist, Python blocks parse.

python tools/check_docs.py
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)|!\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
NAMED_PATH = re.compile(r"`((?:hp_\w+|packages|tests|docs|tools|benchmarks|examples)/[\w./-]+)`")
HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and most site generators create them."""
    plain = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in HEADING.findall(text))
    return {heading.replace(" ", "-") for heading in plain}


def link_problems(page: Path) -> Iterator[str]:
    """Yield a line for each broken link of `page` within the repository."""
    for match in LINK.finditer(BLOCK.sub("", page.read_text())):
        link = match[1] or match[2]
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists():
            yield f"the link {link} leads to no file"
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text()):
            yield f"the link {link} names a heading that {target.name} does not have"


def path_problems(page: Path, root: Path) -> Iterator[str]:
    """Yield a line for each path in backticks that does not exist.

    Paths are relative to the repository's root, to a folder above the page (such as its package), or to a package's
    sources, as in `hp_dtensor/comm/mesh.py`.
    """
    above = [folder for folder in page.parents if folder.is_relative_to(root)]
    for path in dict.fromkeys(NAMED_PATH.findall(page.read_text())):
        package = path.split("/")[0].replace("_", "-")
        if not any((folder / path).exists() for folder in (*above, root / "packages" / package / "src")):
            yield f"there is no {path}"


def block_problems(page: Path) -> Iterator[str]:
    """Yield a line for each Python block of `page` that does not parse."""
    text = page.read_text()
    for match in BLOCK.finditer(text):
        if match[1] in ("python", "py"):
            try:
                ast.parse(match[2])
            except SyntaxError as error:
                line = text.count("\n", 0, match.start()) + 1 + (error.lineno or 1)
                yield f"line {line} of a Python block does not parse: {error.msg}"


def main(root: Path = ROOT) -> int:
    """Print all problems of all tracked pages, and return their number."""
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=root, capture_output=True, text=True, check=True)
    pages = [root / name for name in listed.stdout.split()]
    problems = [
        f"{page.relative_to(root)}: {problem}"
        for page in pages
        for problem in (*link_problems(page), *path_problems(page, root), *block_problems(page))
    ]
    print("\n".join([*problems, f"{len(pages)} pages, {len(problems)} problems"]))
    return len(problems)


if __name__ == "__main__":
    sys.exit(min(main(), 1))
