"""The PyTorch platform."""
