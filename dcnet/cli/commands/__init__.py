"""Decoupled networks for PyTorch."""
