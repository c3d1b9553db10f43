"""Decoupled networks for PyTorch.

Begin with `dcnet train`, which trains a small one in seconds; `dcnet list` shows what there is to choose from.
`dcnet --version` prints the version.
"""
