from dcnet.inference import fold_network, folded_layers

__all__ = [
    "fold_network",
    "folded_layers",
]
