"""The plugin for hp-moe, loaded through the entry-point group `hp_moe`.

MindSpore's CPU kernels have no grouped matrix product, so hp-moe's loop of products is what runs there, and
there is nothing to register.
"""
