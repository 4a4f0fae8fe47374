"""The schema of the one YAML file, and its strict loader."""

from hp_trainer.config._setting import Component, component, section, sections, setting
from hp_trainer.config.cli_options import Option, list_options
from hp_trainer.config.dump import dump_config, settings_by_path, to_plain
from hp_trainer.config.load import LoadedConfig, load_config, parse_config
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
