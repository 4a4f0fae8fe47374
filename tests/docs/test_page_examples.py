"""Every Python block of every page runs as it is, on the framework that it names."""

from __future__ import annotations

import linecache
import sys
import types

import pytest
from pages import Block, blocks

EXAMPLES = [block for block in blocks() if block.language == "python" and not block.title]


def test_there_are_examples() -> None:
    pages = {block.page.parent.name for block in EXAMPLES}
    assert {"hp-dtensor", "hp-fsdp", "hp-moe", "hp-trainer", "hp-platform-torch", "hp-platform-mindspore"} <= pages


@pytest.mark.parametrize("block", EXAMPLES, ids=str)
def test_a_block_runs(block: Block, hp_platform: object, tmp_path, monkeypatch) -> None:
    for framework in ("torch", "mindspore"):
        if framework in block.code:
            pytest.importorskip(framework)
    monkeypatch.chdir(tmp_path)
    filename = f"<{block}>"
    linecache.cache[filename] = len(block.code), None, block.code.splitlines(True), filename  # for tracebacks
    module = types.ModuleType("example")
    monkeypatch.setitem(sys.modules, "example", module)  # dataclasses look their annotations up there
    exec(compile(block.code, filename, "exec"), module.__dict__)
