"""How far a run is."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Progress(BaseModel):
    """How far a run is; part of every manifest."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    step: int
    """Steps of the run, skipped ones included."""
    data_offset: int = 0
    """Steps whose rows were left out after loss spikes: the position in the data is ``step`` plus this."""
    data_fingerprint: str
    """Of the data that the run reads."""
    loss_first: float | None = None
    """Loss of the first step."""
    loss_last: float | None = None
    """Loss of this step."""
    validation_loss: float | None = None
    """The last validation loss."""
    validation_step: int | None = None
    """The step that it was measured at."""
    skipped_steps: int = 0
    """Steps that were not applied."""
    skipped_in_a_row: int = 0
    """The last of them, without an applied one between."""
    recent_losses: tuple[float, ...] = ()
    """Losses of the last applied steps, which a spike is told by."""
    rewinds: int = 0
    """How often the run went back to a checkpoint because of its loss."""
    training_s: float = 0.0
    """Seconds of training until here, over all starts."""
    target_loss_step: int | None = None
    """The step whose validation first reached the target."""
    target_loss_s: float | None = None
    """Seconds of training until then."""

    @property
    def own_validation_loss(self) -> float | None:
        """The validation loss of this step's own weights; None where they were not validated."""
        return self.validation_loss if self.validation_step == self.step else None
