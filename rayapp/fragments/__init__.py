"""The logical state on disk and on its way there: every rank gives the fragments that it owns, any reader puts them together.

A folder holds one `rank-R-of-W.safetensors` for each rank and one `state.json`. A fragment is a run of a parameter's
elements in row-major order: its values lie in the rank's file under `weight/NAME`, `exp_avg/NAME` and `exp_avg_sq/NAME`
(1-D, fp32), and the file's metadata says where in the parameter it starts. No pickle is involved, and a reader maps the
files into memory, so that any strategy and world size can read what it needs and nothing else.
"""

from rayapp.fragments.host_memory import HostMemory
from rayapp.fragments.index import PARTS, STATE_FILE, Part, StateIndex, rank_file
from rayapp.fragments.reading import FragmentedState, reader_of
from rayapp.fragments.safetensors_file import safetensors_pieces, save_tensors
from rayapp.fragments.snapshot import Fragment, Pieces, RankSnapshot, take_snapshot

__all__ = [
    "PARTS",
    "STATE_FILE",
    "Fragment",
    "FragmentedState",
    "HostMemory",
    "Part",
    "Pieces",
    "RankSnapshot",
    "StateIndex",
    "rank_file",
    "reader_of",
    "safetensors_pieces",
    "save_tensors",
    "take_snapshot",
]
