from __future__ import annotations

import pytest

from rayapp.metrics.clock import StepClock, warmup_steps


class Watch:
    """A time source that only moves when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def watch() -> Watch:
    return Watch()


def make_step(clock: StepClock, watch: Watch, compute_s: float, profiled: bool = False):
    with clock.part("compute"):
        watch.now_s += compute_s
    return clock.end_step(profiled)


def test_every_second_of_a_step_is_in_one_part(watch):
    clock = StepClock(10, 6000, now=watch)
    clock.start()
    watch.now_s += 0.25  # outside of any part
    with clock.part("data"):
        watch.now_s += 0.5
    with clock.part("compute"):
        watch.now_s += 2.0
    with clock.part("validation"):
        watch.now_s += 8.0
    with clock.part("checkpoint"):
        watch.now_s += 1.0
    watch.now_s += 0.25
    timing = clock.end_step()
    parts = (timing.data_s, timing.compute_s, timing.other_s, timing.validation_s, timing.checkpoint_s)
    assert parts == (0.5, 2.0, 0.5, 8.0, 1.0)
    assert timing.step_s == 3.0
    assert timing.tokens_per_s == 2000.0
    assert timing.data_wait_share == pytest.approx(1 / 6)
    assert timing.checkpoint_share == 0.25


def test_what_follows_a_step_belongs_to_the_next(watch):
    clock = StepClock(10, 1, now=watch)
    clock.start()
    assert make_step(clock, watch, 2.0).step_s == 2.0
    watch.now_s += 0.5
    assert make_step(clock, watch, 2.0).step_s == 2.5


def test_an_inner_part_is_taken_out_of_the_outer(watch):
    clock = StepClock(10, 1, now=watch)
    clock.start()
    with clock.part("validation"):
        watch.now_s += 1.0
        with clock.part("data"):
            watch.now_s += 2.0
        watch.now_s += 4.0
    timing = clock.end_step()
    assert (timing.validation_s, timing.data_s) == (5.0, 2.0)


def test_a_part_that_raises_is_charged(watch):
    clock = StepClock(10, 1, now=watch)
    clock.start()

    def read() -> None:
        with clock.part("data"):
            watch.now_s += 3.0
            raise KeyError

    with pytest.raises(KeyError):
        read()
    watch.now_s += 1.0
    timing = clock.end_step()
    assert (timing.data_s, timing.other_s) == (3.0, 1.0)


@pytest.mark.parametrize(("num_steps", "expected"), [(1, 1), (9, 1), (10, 1), (11, 2), (20, 2), (30, 3), (31, 3), (1_000_000, 3)])
def test_warmup_is_a_tenth_and_at_most_three(num_steps, expected):
    assert warmup_steps(num_steps) == expected


def test_throughput_leaves_out_warmup_profiled_steps_validation_and_checkpoints(watch):
    clock = StepClock(100, 1000, now=watch)
    clock.start()
    for _ in range(3):
        make_step(clock, watch, 50.0)
        assert clock.tokens_per_s is None
    make_step(clock, watch, 2.0)
    assert clock.tokens_per_s == 500.0
    make_step(clock, watch, 40.0, profiled=True)
    with clock.part("validation"):
        watch.now_s += 30.0
    with clock.part("checkpoint"):
        watch.now_s += 20.0
    make_step(clock, watch, 3.0)
    assert clock.tokens_per_s == 2 * 1000 / 5.0


def test_a_profiled_warmup_step_does_not_lengthen_the_warmup(watch):
    clock = StepClock(20, 1000, now=watch)  # two steps of warm-up
    clock.start()
    make_step(clock, watch, 9.0, profiled=True)
    make_step(clock, watch, 9.0)
    make_step(clock, watch, 4.0)
    assert clock.tokens_per_s == 250.0


def test_the_smoothed_rate_forgets_warmup_and_steps_longer_ago_than_twenty(watch):
    clock = StepClock(100, 1000, now=watch)
    clock.start()
    assert clock.smoothed_tokens_per_s is None
    make_step(clock, watch, 10.0)
    assert clock.smoothed_tokens_per_s == 100.0
    make_step(clock, watch, 10.0)
    make_step(clock, watch, 10.0)
    make_step(clock, watch, 5.0)
    assert clock.smoothed_tokens_per_s == 200.0
    for _ in range(19):
        make_step(clock, watch, 1.0)
    assert clock.smoothed_tokens_per_s == pytest.approx(20_000 / 24)
    make_step(clock, watch, 1.0)
    assert clock.smoothed_tokens_per_s == 1000.0


def test_time_left_counts_validations_and_checkpoints(watch):
    clock = StepClock(10, 1000, now=watch)  # one step of warm-up
    clock.start()
    assert clock.left_s is None
    make_step(clock, watch, 100.0)
    make_step(clock, watch, 2.0)
    assert clock.left_s == 8 * 2.0
    with clock.part("validation"):
        watch.now_s += 6.0
    with clock.part("checkpoint"):
        watch.now_s += 2.0
    make_step(clock, watch, 2.0)
    make_step(clock, watch, 2.0)
    assert clock.left_s == 6 * (2.0 + 8.0 / 4)


def test_nothing_is_left_after_the_last_step(watch):
    clock = StepClock(2, 1000, now=watch)
    clock.start()
    make_step(clock, watch, 1.0)
    make_step(clock, watch, 1.0)
    assert clock.left_s == 0.0


def test_training_time_goes_on_from_earlier_processes_and_stands_still_in_validation(watch):
    clock = StepClock(10, 1, trained_s=500.0, now=watch)
    clock.start()
    make_step(clock, watch, 3.0)
    watch.now_s += 1.0
    with clock.part("validation"):
        watch.now_s += 60.0
        assert clock.trained_s == 504.0
        watch.now_s += 60.0
    with clock.part("checkpoint"):
        watch.now_s += 60.0
    assert clock.trained_s == 504.0
    assert clock.end_step().step_s == 1.0
    assert clock.trained_s == 504.0
