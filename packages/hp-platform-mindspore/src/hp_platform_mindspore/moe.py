"""What this platform gives to hp-moe; loaded through the entry-point group `hp_moe`."""
