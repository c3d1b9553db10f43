"""The same attacks of foolbox, with the same budget, give the same images."""

import pytest
import torch
from attacked_networks import CLASSES, attacked

from dcnet.robustness import attacks

pytestmark = pytest.mark.filterwarnings("ignore")
# Both compute in float64, and differ in the order of sums alone.
CLOSE = {"rtol": 0, "atol": 1e-9}
NORMS = {"linf": "Linf", "l2": "L2"}


def foolbox_images(kind, norm, model, x, y, epsilon, targets=None, **options):
    import foolbox

    attack = getattr(foolbox.attacks, f"{NORMS[norm]}{kind}")(**options)
    criterion = foolbox.criteria.Misclassification(y)
    if targets is not None:
        criterion = foolbox.criteria.TargetedMisclassification(targets)
    _, found, broken = attack(foolbox.PyTorchModel(model, bounds=(0, 1)), x, criterion, epsilons=epsilon)
    return found, broken


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 8 / 255), ("l2", 0.5)])
def test_fgsm(norm, epsilon):
    model, x, y = attacked(50)
    expected, broken = foolbox_images("FastGradientAttack", norm, model, x, y, epsilon)
    found = attacks.fgsm(model, x, y, epsilon=epsilon, norm=norm)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert torch.equal(attacks.correct(model, found, y), ~broken)
    assert 0 < broken.double().mean() < 1


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 4 / 255), ("l2", 0.2)])
@pytest.mark.parametrize("targeted", [False, True])
def test_bim(norm, epsilon, targeted):
    model, x, y = attacked(50)
    targets = (y + 1) % CLASSES if targeted else None
    expected, _ = foolbox_images("BasicIterativeAttack", norm, model, x, y, epsilon, targets)
    found = attacks.bim(model, x, y, epsilon=epsilon, norm=norm, targets=targets, early_stop=False)
    torch.testing.assert_close(found, expected, **CLOSE)
    assert 0 < attacks.accuracy(model, found, y) < 1


@pytest.mark.parametrize(("norm", "epsilon"), [("linf", 4 / 255), ("l2", 0.2)])
def test_pgd_from_random_places(norm, epsilon):
    """Their chance is another one, so that accuracies are compared: at most 3 of 200 images apart."""
    model, x, y = attacked(200)
    torch.manual_seed(0)
    options = {"steps": 20, "rel_stepsize": 0.125}
    _, broken = foolbox_images("ProjectedGradientDescentAttack", norm, model, x, y, epsilon, **options)
    found = attacks.pgd(model, x, y, epsilon=epsilon, norm=norm, steps=20, early_stop=False)
    assert attacks.accuracy(model, found, y) == pytest.approx(1 - broken.double().mean().item(), abs=0.0151)
    assert 0.05 < broken.double().mean() < 0.95
