"""Tests that hp-trainer ships for platforms: `hp_trainer.testing.conformance`."""
