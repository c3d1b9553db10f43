"""Batches depend on seed and step alone, and processes share them."""

import pytest
import torch
from data_files import sentence_of

from dcnet.data import Augmentation, BatchDraws, Batches, Split, augmented
from dcnet.data.order import mixed

HOW = Augmentation(pad=2, flip=True, cutout=3)


def split(count: int = 23) -> Split:
    images = torch.randint(0, 256, (count, 3, 6, 6), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Split(images, torch.arange(count) * 7 % 10)


def tables(batches: Batches, steps: range) -> list[list[list[int]]]:
    return [batches.draws(step).table.tolist() for step in steps]


def test_mixing_is_the_same_everywhere():
    # `printf 3/5 | sha256sum` starts with e8692ca200b54dda; the lowest byte comes first, and the lowest bit is dropped.
    assert mixed(3, 5) == 0xDA4DB500A22C69E8 >> 1


def test_sizes():
    batches = Batches(split(23), 4, HOW, seed=0)
    assert (batches.steps_per_epoch, batches.batch_size) == (5, 4)
    images, labels = batches.images(batches.draws(0))
    assert (images.shape, images.dtype) == ((4, 3, 6, 6), torch.float32)
    assert (labels.shape, labels.dtype) == ((4,), torch.int64)


def test_every_image_is_seen_once_in_an_epoch():
    batches = Batches(split(20), 4, HOW, seed=0)
    for epoch in range(3):
        seen = torch.cat([batches.draws(epoch * 5 + step).index for step in range(5)])
        assert sorted(seen.tolist()) == list(range(20))


def test_what_is_left_of_an_epoch_is_left_out_and_is_another_one_each_time():
    batches = Batches(split(23), 4, HOW, seed=0)
    left = []
    for epoch in range(4):
        seen = {number for step in range(5) for number in batches.draws(epoch * 5 + step).index.tolist()}
        assert len(seen) == 20
        left.append(frozenset(range(23)) - seen)
    assert len(set(left)) > 1


def test_a_step_is_the_same_wherever_one_comes_from():
    straight = tables(Batches(split(), 4, HOW, seed=5), range(15))
    assert tables(Batches(split(), 4, HOW, seed=5), range(7, 15)) == straight[7:]
    batches = Batches(split(), 4, HOW, seed=5)
    batches.draws(12)
    assert tables(batches, range(3, 4)) == straight[3:4]


def test_seeds_epochs_and_steps_differ():
    batches = Batches(split(), 4, HOW, seed=0)
    found = tables(batches, range(10)) + tables(Batches(split(), 4, HOW, seed=1), range(10))
    assert len({str(table) for table in found}) == 20
    first, second = (torch.tensor(found[start : start + 5]).flatten(0, 1) for start in (0, 5))
    # Neither the order nor what chance does repeats in the next epoch.
    for columns in (slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)):
        assert not torch.equal(first[:, columns], second[:, columns])


@pytest.mark.parametrize("world", [2, 4])
def test_processes_share_the_batch_of_one(world: int):
    alone = Batches(split(), 8, HOW, seed=2)
    together = [Batches(split(), 8, HOW, seed=2, rank=rank, world=world) for rank in range(world)]
    assert {(part.batch_size, part.steps_per_epoch) for part in together} == {(8 // world, 2)}
    for step in range(5):
        images, labels = alone.images(alone.draws(step))
        parts = [part.images(part.draws(step)) for part in together]
        assert torch.equal(torch.cat([part[0] for part in parts]), images)
        assert torch.equal(torch.cat([part[1] for part in parts]), labels)


def test_images_and_labels_are_those_of_the_draws(device: str):
    batches = Batches(split().to(device), 4, HOW, seed=0)
    draws = batches.draws(3)
    assert all(tensor.device.type == device for tensor in draws.tensors())
    images, labels = batches.images(draws)
    index = draws.index.cpu()
    assert torch.equal(labels.cpu(), split().labels[index])
    expected = augmented(split().images, index, draws.draws.to("cpu"), HOW)
    torch.testing.assert_close(images.cpu(), expected, rtol=0, atol=1e-7)


def test_every_device_sees_the_same(device: str):
    found = tables(Batches(split().to(device), 4, HOW, seed=0), range(7))
    assert found == tables(Batches(split(), 4, HOW, seed=0), range(7))


def test_draws_are_in_their_ranges():
    batches = Batches(split(), 4, HOW, seed=0)
    draws = [batches.draws(step).draws for step in range(50)]
    shifts, centres = (torch.cat([getattr(each, name) for each in draws]) for name in ("shifts", "centres"))
    assert (shifts.min(), shifts.max()) == (0, 4)
    assert (centres.min(), centres.max()) == (0, 5)
    assert {flip for each in draws for flip in each.flips.tolist()} == {True, False}


def test_static_draws_take_over_others_and_an_epoch_is_not_written_to():
    batches = Batches(split(), 4, HOW, seed=0)
    expected = tables(Batches(split(), 4, HOW, seed=0), range(2))
    static = batches.draws(0)
    memory = [tensor.data_ptr() for tensor in static.tensors()]
    static.copy_(batches.draws(1))
    assert [tensor.data_ptr() for tensor in static.tensors()] == memory
    assert static.table.tolist() == expected[1]
    assert batches.draws(0).table.tolist() == expected[0]
    other = static.clone()
    other.table.zero_()
    assert static.table.tolist() == expected[1]


def test_parts_of_a_table_are_what_it_was_made_of():
    batches = Batches(split(), 4, HOW, seed=0)
    draws = batches.draws(0)
    assert BatchDraws.of(draws.index, draws.draws).table.tolist() == draws.table.tolist()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_holds_the_batches():
    batches = Batches(split().to("cuda"), 4, HOW, seed=0)
    static = batches.draws(0).clone()
    batches.images(static)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        images, labels = batches.images(static)
    for step in (4, 6):
        static.copy_(batches.draws(step))
        graph.replay()
        expected = batches.images(batches.draws(step))
        assert torch.equal(images, expected[0])
        assert torch.equal(labels, expected[1])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 24}, "a batch must have from 1 to 23 images, as many as there are, not 24"),
        ({"batch_size": 0}, "a batch must have from 1 to 23 images, as many as there are, not 0"),
        ({"world": 3}, "a batch of 4 images cannot be shared by 3 processes: it must be a multiple"),
        ({"rank": 2, "world": 2}, "rank must be from 0 to 1, not 2"),
        ({"rank": -1}, "rank must be from 0 to 0, not -1"),
    ],
)
def test_sizes_are_checked(values: dict[str, int], message: str):
    given = {"split": split(), "batch_size": 4, "augmentation": HOW, "seed": 0, **values}
    assert sentence_of(lambda: Batches(**given)) == message


def test_steps_are_counted_from_zero():
    with pytest.raises(ValueError, match="step must be at least 0, not -1"):
        Batches(split(), 4, HOW, seed=0).draws(-1)
