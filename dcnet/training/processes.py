"""The processes of a run: how they find each other after a restart, agree on errors, and report a failure once."""

import os
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed.rendezvous import register_rendezvous_handler, rendezvous

from dcnet.losses.collectives import rank_of

Result = TypeVar("Result")
# torch does not declare its stores in its types.
distributed: Any = dist
# torch's message in a process that waits for another process that has ended.
LOST = "the connection to another process was lost: it failed, was killed, or did not answer in time"
STORE_TIMEOUT = timedelta(seconds=5)
# The scheme of the addresses that `_meet_again` handles.
SCHEME = "dcnet-restart"


def agree(work: Callable[[], Result], group: Any = None) -> Result:
    """Calls `work` in all processes; if it raises OSError or ValueError in one of them, all raise its error."""
    result: Any = None
    failure: Exception | None = None
    try:
        result = work()
    except (OSError, ValueError) as error:
        failure = error
    for found in gather_objects(failure, group):
        if found is not None:
            found.agreed = True
            raise found
    return result


def gather_objects(own: Any, group: Any = None) -> list[Any]:
    """The objects of all processes, which must call this."""
    found: list[Any] = [own] * rank_of(group)[1]
    if len(found) > 1:
        dist.all_gather_object(found, own, group=group)
    return found


def is_lost_connection(error: RuntimeError) -> bool:
    """Whether the connection to another process was closed, or the other process did not answer in time."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def reports(run: str, error: Exception) -> bool:
    """Whether this process reports the error of a run: the first to fail, if torchrun has a store that outlives them.

    Without such a store, the first process reports errors that `agree` raised in all, and each process its other ones.
    """
    if not uses_agent_store():
        return rank_of(None)[0] == 0 or not getattr(error, "agreed", False)
    try:
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        # torch would try for a long time, and print a trace of C++ functions.
        socket.create_connection((address, port), STORE_TIMEOUT.total_seconds()).close()
        store = distributed.TCPStore(address, port, is_master=False, timeout=STORE_TIMEOUT)
        return bool(store.add(f"dcnet/{restart_count()}/{run}", 1) == 1)
    except (KeyError, OSError, RuntimeError, ValueError):
        # For example, if the launcher on the first machine has ended.
        return True


def uses_agent_store() -> bool:
    """Whether torchrun holds the store in which processes publish their addresses."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def restart_count() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def process_group_options() -> list[InitProcessGroupKwargs]:
    """The options of accelerate with which processes find each other after torchrun has restarted them.

    The store of torchrun outlives the processes, and torch would find the addresses of the ended ones in it. On several
    machines, the launchers count restarts differently; there, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.
    """
    if restart_count() == "0" or not uses_agent_store() or os.environ.get("GROUP_WORLD_SIZE", "1") != "1":
        return []
    return [InitProcessGroupKwargs(init_method=f"{SCHEME}://")]


def _meet_again(url: str, timeout: timedelta, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Finds the processes as torch does by default, but uses separate names in the store for each restart."""
    for store, rank, world in rendezvous("env://", timeout=timeout):
        yield distributed.PrefixStore(f"restart-{restart_count()}", store), rank, world


register_rendezvous_handler(SCHEME, _meet_again)
