"""The experiments; every module in this package is imported and may register more."""
