"""Two ranks of which one comes late to a collective."""

from __future__ import annotations

import os
import threading
import time

import torch
import torch.distributed as dist

from rayapp.train.whereabouts import RECORDER_ENVIRONMENT, collectives_entered, place_of

LATE_S = 2.0
LOOK_S = 1.0


def waiting_place() -> tuple[str, tuple[int, str] | None]:
    """Where this rank's main thread is while the other one sleeps, and what it has entered."""
    dist.destroy_process_group()
    os.environ.update(RECORDER_ENVIRONMENT)  # read when a group is made
    dist.init_process_group("gloo")
    for _ in range(3):
        dist.all_reduce(torch.ones(1))
    main, found = threading.get_ident(), []
    looking = threading.Timer(LOOK_S, lambda: found.append((place_of(main), collectives_entered())))
    looking.start()
    if dist.get_rank() == 1:
        time.sleep(LATE_S)
    dist.all_reduce(torch.ones(1))
    looking.join()
    return found[0]
