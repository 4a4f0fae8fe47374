"""The interfaces of HyperParallel and of torch.distributed's process groups, as thin fronts of the newer functions.

The rest of the package never imports this folder.
"""
