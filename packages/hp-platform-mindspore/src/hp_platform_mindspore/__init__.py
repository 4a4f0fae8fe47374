"""The MindSpore platform."""
