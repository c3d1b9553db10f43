"""Benchmarks of layers, training steps and inference, against torch's own layers in the same run."""
