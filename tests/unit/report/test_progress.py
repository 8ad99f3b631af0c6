from __future__ import annotations

from rayapp.report.progress import progress_line


def test_the_whole_line():
    line = progress_line(step=40, num_steps=100, loss=6.12, learning_rate=1.7e-3, tokens_per_s=12_345.0, mfu=0.412, left_s=72.0)
    assert line == "step  40/100  loss 6.120  lr 1.7e-03  12.3k tok/s  MFU 41.2 %  left 1m12s"


def test_what_is_not_known_is_left_out():
    assert progress_line(step=1, num_steps=9, loss=6.0, learning_rate=1e-3) == "step 1/9  loss 6.000  lr 1.0e-03"


def test_a_loss_that_is_not_finite_is_said():
    assert "loss not finite" in progress_line(step=1, num_steps=9, loss=None, learning_rate=1e-3)


def test_lines_of_one_run_align():
    lines = [progress_line(step=step, num_steps=1000, loss=6.0, learning_rate=1e-3) for step in (1, 10, 1000)]
    assert len({line.index("loss") for line in lines}) == 1
