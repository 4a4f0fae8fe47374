"""HyperParallel's interfaces and torch.distributed's process-group functions, as thin fronts of this package's own.

The rest of the package never imports this folder.
"""
