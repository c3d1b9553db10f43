"""Run by each of several processes: a label out of range in one of them ends the step of all, which then go on."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dcnet.ending import end_process
from dcnet.losses import ShardedMarginSoftmax

FEATURES, CLASSES = 6, 11
# A process that waits for another one in vain ends after this.
PATIENCE = timedelta(seconds=60)


def sentence_of(call, labels):
    try:
        call(torch.randn(len(labels), FEATURES), torch.tensor(labels, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return None


def check(call, bad, rank, count):
    """One process has a label that is none; the others have as many labels as they like."""
    labels = [rank] * (count - 1) + [bad if dist.get_rank() == rank else 0]
    expected = f"label {bad} is none of the {CLASSES} classes, from 0 to {CLASSES - 1}"
    assert sentence_of(call, labels) == expected, (bad, rank)
    assert sentence_of(call, [0] * count) is None


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=PATIENCE)
    head = ShardedMarginSoftmax(FEATURES, CLASSES, "arcface")
    for rank in range(dist.get_world_size()):
        for bad in (-1, CLASSES, 10**12):
            check(head, bad, rank, count=3)
            check(head.diagnose, bad, rank, count=1 + dist.get_rank())
    dist.barrier()
    dist.destroy_process_group()
    print("told")
    end_process()
