"""Decoupled networks for PyTorch.

Start with `dcnet train`, which trains a small network in seconds; `dcnet list` shows the choices. `dcnet --version`
prints the version.
"""
