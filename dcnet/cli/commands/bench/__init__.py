"""Measure what decoupling costs on this machine."""
