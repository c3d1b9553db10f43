"""All experiments; every module in this package is imported, so that it can register some."""
