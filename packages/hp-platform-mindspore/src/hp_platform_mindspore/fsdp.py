"""What this platform gives to hp-fsdp; loaded through the entry-point group `hp_fsdp`."""
