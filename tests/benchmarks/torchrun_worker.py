"""The entry point that `torchrun` starts: the same worker as under Ray, without Ray."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from rayapp.train.lifeline import LocalLifeline
from rayapp.train.worker import run_worker


def main(run_file: str, result_file: str) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    lifeline = LocalLifeline(lambda line: print(line, file=sys.stderr))
    outcome = run_worker(Path(run_file).read_text(), device=device, lifeline=lifeline, optional_sinks=lambda *_: [])
    if dist.get_rank() == 0:
        Path(result_file).write_bytes(pickle.dumps(outcome))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
