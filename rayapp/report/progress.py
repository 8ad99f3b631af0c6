"""The line that shows how a run is doing. Pure."""

from __future__ import annotations

from rayapp.report.quantity import format_count, format_duration, format_share


def progress_line(
    *,
    step: int,
    num_steps: int,
    loss: float | None,
    learning_rate: float,
    tokens_per_s: float | None = None,
    mfu: float | None = None,
    left_s: float | None = None,
) -> str:
    """One line: ``step  40/100  loss 6.120  lr 1.7e-03  12.3k tok/s  MFU 41.2 %  left 1m12s``.

    Args:
        step: steps done.
        num_steps: steps of the run.
        loss: in nats; None if it was not finite.
        learning_rate: of the step.
        tokens_per_s: all ranks; None, as the two that follow, leaves it out.
        mfu: model FLOP/s over the peak, 0 to 1.
        left_s: seconds until the last step's end.
    """
    parts = [
        f"step {step:>{len(str(num_steps))}}/{num_steps}",
        "loss not finite" if loss is None else f"loss {loss:.3f}",
        f"lr {learning_rate:.1e}",
    ]
    if tokens_per_s is not None:
        parts.append(f"{format_count(tokens_per_s)} tok/s")
    if mfu is not None:
        parts.append(f"MFU {format_share(mfu)}")
    if left_s is not None:
        parts.append(f"left {format_duration(left_s)}")
    return "  ".join(parts)
