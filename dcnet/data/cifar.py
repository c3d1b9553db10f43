"""CIFAR-10 and CIFAR-100, unpacked or in their archives."""

from dataclasses import dataclass
from pathlib import Path

import torch

from dcnet.data.cifar_files import Arrays, Layout, Pickled, Records
from dcnet.data.dataset import Dataset, Split
from dcnet.data.download import Remote, fetch, missing
from dcnet.data.registry import register

URL = "https://www.cs.toronto.edu/~kriz/"
BATCHES = tuple(f"data_batch_{number}" for number in range(1, 6))

CLASSES_10 = "airplane automobile bird cat deer dog frog horse ship truck"
CLASSES_100 = (
    "apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus butterfly camel can "
    "castle caterpillar cattle chair chimpanzee clock cloud cockroach couch crab crocodile cup dinosaur dolphin "
    "elephant flatfish forest fox girl hamster house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster "
    "man maple_tree motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear pickup_truck "
    "pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk "
    "skyscraper snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television tiger "
    "tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm"
)


@dataclass(frozen=True)
class Cifar:
    """A data set in any of its layouts, of which the first is the one to download."""

    name: str
    classes: tuple[str, ...]
    layouts: tuple[Layout, ...]

    @property
    def files(self) -> tuple[Remote, ...]:
        return (self.layouts[0].archive,)

    def load(self, folder: Path, download: bool) -> Dataset:
        """Reads the files where they are found first; otherwise their archive is downloaded."""
        found = self._find(folder)
        if found is None and not download:
            folders = " or ".join(f"{layout.folder} or {layout.archive.name}" for layout in self.layouts)
            raise missing(self.name, folder, f"{folders}, with all files in it", self.files[0].url)
        layout, place = found or (self.layouts[0], fetch(self.files[0], folder))
        train, test = layout.read(place)
        return Dataset(self.name, _split(train), _split(test), self.classes)

    def _find(self, folder: Path) -> tuple[Layout, Path] | None:
        roots = (folder, folder / self.name)
        for find in (Layout.unpacked, Layout.packed):
            for root in roots:
                for layout in self.layouts:
                    if place := find(layout, root):
                        return layout, place
        return None


def _split(arrays: Arrays) -> Split:
    images, labels = (torch.from_numpy(part) for part in arrays)
    return Split(images.view(-1, 3, 32, 32), labels.long())


CIFAR_10 = Cifar(
    "cifar10",
    tuple(CLASSES_10.split()),
    (
        Layout(
            Remote(
                f"{URL}cifar-10-binary.tar.gz",
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
            "cifar-10-batches-bin",
            tuple(f"{name}.bin" for name in BATCHES),
            ("test_batch.bin",),
            Records((10,)),
        ),
        Layout(
            Remote(
                f"{URL}cifar-10-python.tar.gz",
                "sha256:6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
            ),
            "cifar-10-batches-py",
            BATCHES,
            ("test_batch",),
            Pickled("labels", 10),
        ),
    ),
)

CIFAR_100 = Cifar(
    "cifar100",
    tuple(CLASSES_100.split()),
    (
        Layout(
            Remote(
                f"{URL}cifar-100-binary.tar.gz",
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
            "cifar-100-binary",
            ("train.bin",),
            ("test.bin",),
            Records((20, 100)),
        ),
        Layout(
            Remote(
                f"{URL}cifar-100-python.tar.gz",
                "sha256:85cd44d02ba6437773c5bbd22e183051d648de2e7d6b014e1ef29b855ba677a7",
            ),
            "cifar-100-python",
            ("train",),
            ("test",),
            Pickled("fine_labels", 100),
        ),
    ),
)

_ABOUT = "photographs, 32 x 32, colour, {} classes, 50,000 + 10,000 images; downloads {} MB"
register("cifar10", _ABOUT.format(10, 170), CIFAR_10.files)(CIFAR_10.load)
register("cifar100", _ABOUT.format(100, 169), CIFAR_100.files)(CIFAR_100.load)
