"""An example of a third party's platform: NumPy tensors, a small tape, in-process ranks."""
