"""Reading a configuration: strict, all problems at once, each with its path, its line and a suggestion."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hp_trainer.config._converter import Converter
from hp_trainer.config._include import parse_file, read_text
from hp_trainer.config._tree import Items, Section, Tree, apply_overrides
from hp_trainer.config._values import INVALID
from hp_trainer.config.schema import TrainerConfig
from hp_trainer.exceptions import ConfigError, Problem, raise_if_any
from hp_trainer.registries import Registries

Override = tuple[str, str]


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration and where each of its values stands.

    Attributes:
        config: the resolved configuration.
        sources: `file:line` or `--option` of every dotted path that was given.
    """

    config: TrainerConfig
    sources: dict[str, str]

    def locate(self, problems: Iterable[Problem]) -> list[Problem]:
        """Return the problems with the place of their path, or of the nearest section that was given."""
        return [dataclasses.replace(problem, source=self._source(problem.path)) for problem in problems]

    def _source(self, path: str) -> str:
        while path and path not in self.sources:
            path = path.rpartition(".")[0]
        return self.sources.get(path, "")


def load_config(path: str | Path, overrides: Sequence[Override] = (), *, registered: Registries) -> LoadedConfig:
    """Read a YAML file.

    Args:
        path: the file.
        overrides: `(dotted path, text)` pairs that take precedence; the text is read as YAML, but taken as it
            is where the setting is text.
        registered: what names in the file may mean; `hp_trainer.plugins.registries()` are the installed plugins'.

    Raises:
        ConfigError: listing every problem.
    """
    text = read_text(Path(path))
    return parse_config(text, overrides, source=str(path), registered=registered, folder=Path(path).parent)


def parse_config(
    text: str,
    overrides: Sequence[Override] = (),
    *,
    registered: Registries,
    source: str = "configuration",
    folder: Path = Path(),
) -> LoadedConfig:
    """Like `load_config`, from YAML text; `source` names it in problems, relative paths count from `folder`.

    Raises:
        ConfigError: listing every problem.
    """
    tree, problems = parse_file(text, source, folder, ((folder / Path(source).name).resolve(),))
    if tree is None:
        raise ConfigError(problems, source)
    problems += apply_overrides(tree, overrides)
    converter = Converter(registered, TrainerConfig)
    config = converter.section(TrainerConfig, tree, "")
    raise_if_any([*problems, *converter.problems], ConfigError, source)
    assert config is not INVALID, "an invalid configuration without a problem"
    return LoadedConfig(config, dict(_sources(tree, "")))


def _sources(tree: Tree, path: str) -> Iterator[tuple[str, str]]:
    if path:
        yield path, tree.source
    if isinstance(tree, Section):
        for key, inner in tree.items.items():
            yield from _sources(inner, f"{path}.{key}" if path else key)
    elif isinstance(tree, Items):
        for i, inner in enumerate(tree.items):
            yield from _sources(inner, f"{path}[{i}]")
