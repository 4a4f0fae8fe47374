"""Tests that hp-moe ships for platforms: `hp_moe.testing.conformance`."""
