"""What a start can be refused for before a Ray is started or asked for anything."""

from __future__ import annotations

from rayapp.cluster.inventory import ClusterInventory
from rayapp.config.load import LoadedRunFile
from rayapp.config.resolved import ResolvedRun
from rayapp.config.schema import RunFile
from rayapp.data.prepare import find_prepared, fingerprint
from rayapp.data.shards import PreparedData
from rayapp.preflight.derive import derive_all
from rayapp.preflight.resolve import check_prepared, check_resumable, check_same_data
from rayapp.storage import Location


def find_usable(file: RunFile, storage: Location, before: ResolvedRun | None) -> PreparedData | None:
    """The prepared data of a run file, proved to be whole; None where it is still to be prepared.

    Args:
        file: the run file.
        storage: where prepared data lies.
        before: the run to resume.

    Raises:
        DataError: the corpus or the tokenizer is not as the run file says, the prepared data is damaged, or the run to resume
            was started on other data.
    """
    found = find_prepared(file, storage)
    if before is not None:
        check_same_data(fingerprint(file) if found is None else found.manifest.fingerprint, before)
    if found is not None:
        check_prepared(found)
    return found


def check_start(loaded: LoadedRunFile, inventory: ClusterInventory, prepared: PreparedData | None, before: ResolvedRun | None) -> None:
    """Refuse what cannot work on a cluster.

    Args:
        loaded: the run file.
        inventory: the cluster.
        prepared: its data; None where it is still to be prepared, and then a model to resume is not compared yet, for its
            vocabulary may be that of a tokenizer which is not trained yet.
        before: the run to resume.

    Raises:
        InputError: something cannot work.
    """
    derived = derive_all(loaded, inventory, prepared)
    if prepared is not None and before is not None:
        check_resumable(derived, before)
