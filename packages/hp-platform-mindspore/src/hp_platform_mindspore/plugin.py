"""What this platform gives to hp-dtensor; loaded through the entry-point group `hp_dtensor`."""
