"""PyTorch as a platform of hp-dtensor, hp-fsdp, hp-moe and hp-trainer; found through its entry points."""
