"""The MindSpore platform of hp-dtensor, hp-fsdp, hp-moe and hp-trainer."""
