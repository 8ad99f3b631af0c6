from __future__ import annotations

import pytest

from rayapp.report.quantity import format_bytes, format_count, format_duration, format_share


@pytest.mark.parametrize(
    ("num_bytes", "expected"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1010 * 1024, "1010 KiB"),
        (1_310_000_000, "1.22 GiB"),
        (59_400_000_000, "55.3 GiB"),
        (80 * 2**30, "80.0 GiB"),
        (2**40, "1.00 TiB"),
        (2**60, "1024 PiB"),
    ],
)
def test_bytes(num_bytes, expected):
    assert format_bytes(num_bytes) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (3.214, "3.21"),
        (999.4, "999"),
        (999.6, "1.00k"),
        (1000, "1.00k"),
        (12_345, "12.3k"),
        (99_960, "100k"),
        (999_600, "1.00M"),
        (1_240_000_000, "1.24B"),
        (2e15, "2000T"),
    ],
)
def test_counts(count, expected):
    assert format_count(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0, "0.0s"),
        (4.16, "4.2s"),
        (9.97, "10s"),
        (42.4, "42s"),
        (59.7, "1m00s"),
        (72, "1m12s"),
        (3599.7, "1h00m"),
        (7500, "2h05m"),
        (86_399, "1d00h"),
        (3 * 86_400 + 4 * 3600, "3d04h"),
    ],
)
def test_durations(seconds, expected):
    assert format_duration(seconds) == expected


def test_shares():
    assert format_share(0.41234) == "41.2 %"
