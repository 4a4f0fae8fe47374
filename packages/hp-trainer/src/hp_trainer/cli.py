"""The command `hp-train`."""
