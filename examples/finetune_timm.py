"""Decouples a trained timm network and fine-tunes it, on scikit-learn's digits enlarged to 32 x 32.

For a pretrained network, pass `pretrained=True` to `timm.create_model` and use your own images.
Needs the extra `timm`.
"""

import torch
import torch.nn.functional as F
from rich.console import Console
from sklearn.datasets import load_digits
from torch import Tensor, nn

import dcnet
from dcnet.cli.options import Parser, run_program
from dcnet.models.timm_models import import_timm

Images = tuple[Tensor, Tensor]


def load_images() -> tuple[Images, Images]:
    pixels, classes = load_digits(return_X_y=True)
    x = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1
    x, y = F.interpolate(x, size=32, mode="bilinear"), torch.tensor(classes)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return (x[order[:1200]], y[order[:1200]]), (x[order[1200:]], y[order[1200:]])


def train(model: nn.Module, images: Images, epochs: int, learning_rate: float) -> None:
    """Trains with AdamW and a cosine schedule; unweighted filters do not decay."""
    model.train()
    groups = dcnet.optim.param_groups(model, weight_decay=0.05)
    optimizer = torch.optim.AdamW(groups, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    x, y = images
    for _ in range(epochs):
        for batch in torch.randperm(len(x)).split(60):
            optimizer.zero_grad()
            F.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, images: Images) -> float:
    model.eval()
    return 100 * (model(images[0]).argmax(1) == images[1]).float().mean().item()


def main(epochs: int = 6, tuning_epochs: int = 3) -> None:
    timm = import_timm()
    torch.manual_seed(0)
    console = Console()
    training_images, test_images = load_images()
    plain = timm.create_model("test_resnet", num_classes=10, in_chans=1)
    train(plain, training_images, epochs, learning_rate=3e-3)
    console.print(f"plain: test accuracy {accuracy(plain, test_images):.1f} %")

    for start in ("as-is", "calibrated"):
        data = [training_images[0][:300]] if start == "calibrated" else None
        report = console.print if start == "calibrated" else None
        model = dcnet.decouple(plain, "tanh-cos", first=False, shortcuts=False, start=start, data=data, report=report)
        before = accuracy(model, test_images)
        train(model, training_images, tuning_epochs, learning_rate=1e-3)
        after = accuracy(model, test_images)
        console.print(f"tanh-cos, {start}: test accuracy {before:.1f} % before and {after:.1f} % after fine-tuning")


if __name__ == "__main__":
    Parser(description=__doc__).parse_args()
    run_program(main)
