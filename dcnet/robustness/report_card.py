"""The report card of a network under attack, measurement by measurement, and the short form of the paper's tables."""

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from dcnet.robustness.accuracy import accuracy
from dcnet.robustness.measurements import Measured, measurements
from dcnet.robustness.perturbing import perturb
from dcnet.robustness.subject import Subject
from dcnet.robustness.task import BATCH

Results = dict[str, Measured]


def report_card(
    subject: Subject,
    done: Mapping[str, Measured] | None = None,
    begins: Callable[[str], object] | None = None,
    ends: Callable[[str, Results], object] | None = None,
) -> Results:
    """All measurements by name, as plain values for a record; each has its seconds, or why it was skipped.

    Args:
        subject: who is attacked.
        done: measurements of an earlier time, which are not made again, but for those that were skipped.
        begins: is told the name of each measurement before it is made.
        ends: is told its name afterwards, and all that is known by then.
    """
    results = {name: dict(found) for name, found in (done or {}).items() if "skipped" not in found}
    for name, measure in measurements.items():
        if name in results:
            continue
        if begins is not None:
            begins(name)
        before = time.perf_counter()
        results[name] = measure(subject)
        results[name]["seconds"] = time.perf_counter() - before
        if ends is not None:
            ends(name, dict(results))
    return {name: results[name] for name in measurements}


def evaluate_attacks(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    source: nn.Module | None = None,
    *,
    epsilon: float = 8 / 255,
    steps: int = 10,
    step: float | None = None,
    seed: int = 0,
    batch_size: int = BATCH,
) -> dict[str, Any]:
    """Accuracies, shares from 0 to 1, under FGSM and BIM, as in Tables 7 and 8 of the paper.

    "clean" is without an attack, "white_box" with attacks on the model itself, and "black_box" with attacks on the
    source, as far as they go, whose images are shown to the model; None without a source.

    Args:
        model: from pixels, 0 to 1, to logits; attacked in evaluation mode.
        images: uint8, or float from 0 to 1.
        labels: int [N].
        source: another network for the same classes.
        epsilon: by how much a pixel may change.
        steps: of BIM.
        step: by how much a pixel changes in a step of BIM; None for 2 epsilon / steps.
        seed: of all chance, of which these attacks have none.
        batch_size: how many images are attacked at once.
    """
    settings: dict[str, dict[str, Any]] = {"fgsm": {}, "bim": {"steps": steps, "step": step}}

    def under(name: str, made_with: nn.Module | None) -> float:
        options: dict[str, Any] = {"epsilon": epsilon, "seed": seed, "batch_size": batch_size, "source": made_with}
        found = perturb(model, images, labels, name, **options, **settings[name])
        return accuracy(model, found, labels, batch_size=batch_size)

    return {
        "epsilon": epsilon,
        "steps": steps,
        "step": 2 * epsilon / steps if step is None else step,
        "images": len(images),
        "clean": accuracy(model, images, labels, batch_size=batch_size),
        "white_box": {name: under(name, None) for name in settings},
        "black_box": None if source is None else {name: under(name, source) for name in settings},
    }
