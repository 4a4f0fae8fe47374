"""Docstrings begin with the thing that they are about, or with a verb."""

import ast
import re
import subprocess

RIDDLE = re.compile(r"(What|Whether|They|Where|How|Which|Who|See)\b(?! `)")


def docstrings(path):
    """Yield (line, docstring) of everything in a file that has one."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node)
            if text:
                yield getattr(node, "lineno", 1), text


def test_no_docstring_is_a_riddle(root):
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"]
    listed = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    files = [root / name for name in listed if (root / name).exists()]
    riddles = [
        f"{path.relative_to(root)}:{line}: {text.splitlines()[0]}"
        for path in files
        for line, text in docstrings(path)
        if RIDDLE.match(text)
    ]
    assert not riddles, "\n".join(riddles)


def test_the_pattern_knows_a_riddle_from_a_reference():
    assert RIDDLE.match("What of the step is not in forward.")
    assert not RIDDLE.match("See `CallOrder.check`.")
    assert not RIDDLE.match("Whole parameters for a while.")
