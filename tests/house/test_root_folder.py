"""The repository holds what people wrote, and nothing that runs have left."""

import subprocess

ROOT_ENTRIES = {
    *(".ci", ".github", ".gitignore", "CONTRIBUTING.md", "LICENSE", "README.md", "SECURITY.md", "benchmarks"),
    *(
        "conftest.py",
        "docs",
        "examples",
        "mkdocs.yml",
        "noxfile.py",
        "packages",
        "pyproject.toml",
        "run.py",
        "tests",
        "tools",
    ),
}


def test_nothing_but_the_known_files_and_folders_is_in_the_root(root):
    listed = subprocess.run(["git", "ls-files"], cwd=root, capture_output=True, text=True, check=True)
    assert {path.partition("/")[0] for path in listed.stdout.splitlines()} == ROOT_ENTRIES


def test_no_weights_or_tokens_are_committed(root):
    kinds = ["*.safetensors", "*.bin", "*.npz", "*.pt", "*.ckpt", "*metrics.jsonl"]
    listed = subprocess.run(["git", "ls-files", *kinds], cwd=root, capture_output=True, text=True, check=True)
    assert listed.stdout.splitlines() == []
