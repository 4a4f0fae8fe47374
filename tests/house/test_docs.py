"""The checker of the Markdown pages finds what it is for."""

import ast
import re
import subprocess

import check_docs
import pytest

PAGE = """# A page

[there](other.md) [heading](other.md#two-words) [web](https://example.org) ![picture](picture.png)
[here](#a-page) `hp_x/y.py` and `docs/runs`

```python
x = [1, 2](3)
```
"""


@pytest.fixture
def pages(tmp_path):
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "other.md").write_text("## Two words\n")
    (tmp_path / "picture.png").write_bytes(b"")
    (tmp_path / "docs" / "runs").mkdir(parents=True)
    (tmp_path / "packages" / "hp-x" / "src" / "hp_x").mkdir(parents=True)
    (tmp_path / "packages" / "hp-x" / "src" / "hp_x" / "y.py").write_text("")
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    return tmp_path


def test_right_pages_have_no_problem(pages, capsys):
    assert check_docs.main(pages) == 0
    assert capsys.readouterr().out == "2 pages, 0 problems\n"


@pytest.mark.parametrize(
    ("right", "wrong", "problem"),
    [
        ("(other.md)", "(othr.md)", "page.md: the link othr.md leads to no file"),
        ("#two-words", "#two", "page.md: the link other.md#two names a heading that other.md does not have"),
        ("(picture.png)", "(pict.png)", "page.md: the link pict.png leads to no file"),
        ("`hp_x/y.py`", "`hp_x/z.py`", "page.md: there is no hp_x/z.py"),
        (
            "x = [1, 2](3)",
            "x = [1, 2",
            "page.md: line 7 of a Python block does not parse: '[' was never closed",
        ),
    ],
)
def test_problems_are_named(pages, capsys, right, wrong, problem):
    (pages / "page.md").write_text(PAGE.replace(right, wrong))
    assert check_docs.main(pages) == 1
    assert problem in capsys.readouterr().out


def hook_specifications(path):
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            yield node


def test_every_hook_is_on_the_page_of_plugins(root):
    page = (root / "docs" / "plugins.md").read_text()
    paths = sorted(root.glob("packages/*/src/**/hookspecs.py"))
    hooks = [hook for path in paths for hook in hook_specifications(path)]
    assert hooks
    # The hooks that only follow a run come in many pairs, of which the page shows the first.
    named = [hook.name for hook in hooks if not re.match(r"hp_(before|after|error)_", hook.name)]
    assert [name for name in named if f"`{name}`" not in page] == []
