"""Run by each of several processes: batches of other sizes end the step of all, which then go on."""

from datetime import timedelta

import torch
import torch.distributed as dist

from dcnet.ending import end_process
from dcnet.losses import ShardedMarginSoftmax

FEATURES, CLASSES = 6, 11
# A process that waits for another one in vain ends after this.
PATIENCE = timedelta(seconds=60)


def sentence_of(head, count):
    try:
        head(torch.randn(count, FEATURES), torch.zeros(count, dtype=torch.int64))
    except ValueError as error:
        return str(error)
    return None


if __name__ == "__main__":
    dist.init_process_group("gloo", timeout=PATIENCE)
    head, rank = ShardedMarginSoftmax(FEATURES, CLASSES, "arcface"), dist.get_rank()
    expected = "all processes must give equally many features, not 4, 3 and 3: leave out the last batch, or fill it up"
    assert sentence_of(head, 4 if rank == 0 else 3) == expected
    assert sentence_of(head, 3) is None
    dist.barrier()
    dist.destroy_process_group()
    print("told")
    end_process()
