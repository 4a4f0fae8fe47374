"""The schema of a run's YAML file, and its strict loader.

Text is parsed to a tree with line numbers (`yaml_tree`), in which environment variables are substituted, included files
merged and overrides of the command line inserted. pydantic validates its values as the dataclasses of `schema`, and
`problems` reports what it rejects. A new setting is one field in `schema`, or in the options of its component; help,
command line and JSON Schema follow.
"""

from hp_trainer.config.json_schema import Option, default_values, json_schema, list_options
from hp_trainer.config.load import LoadedConfig, dump_config, load_config, parse_config, settings_by_path, to_plain
from hp_trainer.config.schema import (
    AdamWConfig,
    CheckpointConfig,
    FaultToleranceConfig,
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
from hp_trainer.config.sections import Component, FilePath, Registered, Sections, matches_any, section

__all__ = [
    "AdamWConfig",
    "CheckpointConfig",
    "Component",
    "FaultToleranceConfig",
    "FilePath",
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
    "Registered",
    "RunConfig",
    "Sections",
    "TrainerConfig",
    "TrainingConfig",
    "default_values",
    "dump_config",
    "json_schema",
    "list_options",
    "load_config",
    "matches_any",
    "parse_config",
    "section",
    "settings_by_path",
    "to_plain",
]
