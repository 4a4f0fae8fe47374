"""The schema of a run's YAML file, and its strict loader.

Text is parsed to a tree with line numbers (`_tree`), in which environment variables are substituted, included files
merged and overrides of the command line inserted; the tree is converted to the dataclasses of `schema` (`_converter`).
A new setting is one field in `schema`, or in the options dataclass of its component; help and command line follow.
"""

from hp_trainer.config.load import (
    LoadedConfig,
    Option,
    dump_config,
    list_options,
    load_config,
    parse_config,
    settings_by_path,
    to_plain,
)
from hp_trainer.config.schema import (
    AdamWConfig,
    CheckpointConfig,
    GenerateConfig,
    GuardConfig,
    LaunchConfig,
    LrScheduleConfig,
    MetricsConfig,
    ParallelConfig,
    ParameterGroupConfig,
    ProfileConfig,
    RunConfig,
    TrainerConfig,
    TrainingConfig,
)
from hp_trainer.config.settings import Component, component, section, sections, setting

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "Component",
    "GenerateConfig",
    "GuardConfig",
    "LaunchConfig",
    "LoadedConfig",
    "LrScheduleConfig",
    "MetricsConfig",
    "Option",
    "ParallelConfig",
    "ParameterGroupConfig",
    "ProfileConfig",
    "RunConfig",
    "TrainerConfig",
    "TrainingConfig",
    "component",
    "dump_config",
    "list_options",
    "load_config",
    "parse_config",
    "section",
    "sections",
    "setting",
    "settings_by_path",
    "to_plain",
]
