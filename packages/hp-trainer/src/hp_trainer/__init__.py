"""The trainer: one YAML file, any layout, any framework that has a platform package."""
