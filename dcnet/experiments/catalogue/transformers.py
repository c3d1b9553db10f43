"""Vision transformers on CIFAR-100: plain and decoupled linear layers by one recipe."""

from dcnet.experiments.experiment import Cell, Experiment, register
from dcnet.operator import PLAIN
from dcnet.training import recipe

EPOCHS = 50
# By row: model and operator.
NETWORKS = {
    "plain": ("vit-tiny", PLAIN),
    "linear-cos": ("vit-tiny", "linear-cos"),
    "tanh-cos": ("vit-tiny", "tanh-cos"),
    "linear-cos, normalized tokens": ("vit-tiny-normalized", "linear-cos"),
}


@register
def transformers() -> Experiment:
    """ViT-Ti for images of 32 x 32, with a quarter of the epochs of its recipe."""
    cells = tuple(
        Cell(row, "test error", recipe("vit-cifar", model=model, operator=operator, epochs=EPOCHS))
        for row, (model, operator) in NETWORKS.items()
    )
    title = f"Transformers: vit-tiny, CIFAR-100, {EPOCHS} epochs by one recipe, test error in %"
    return Experiment("transformers", title, cells, seeds=3)
