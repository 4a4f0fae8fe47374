"""Tests that hp-fsdp ships for platforms: `hp_fsdp.testing.conformance`."""
