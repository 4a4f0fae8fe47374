"""What this platform gives to hp-trainer; loaded through the entry-point group `hp_trainer`."""
