from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayapp.metrics.communication import covered, is_communication


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([], 0),
        ([(10, 20)], 10),
        ([(10, 20), (30, 35)], 15),
        ([(10, 20), (15, 30)], 20),  # overlapping
        ([(10, 40), (15, 30)], 30),  # one inside the other
        ([(30, 40), (10, 20)], 20),  # out of order
        ([(-50, 5), (95, 200)], 10),  # cut at the step's borders
        ([(-50, -10), (100, 200)], 0),
        ([(-50, 200)], 100),
        ([(20, 20)], 0),
    ],
)
def test_the_union_inside_the_step(intervals, expected):
    assert covered(intervals, 0, 100) == expected


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-20, 120), st.integers(0, 60)), max_size=12))
def test_the_union_is_as_many_nanoseconds_as_can_be_counted(spans):
    intervals = [(begin, begin + length) for begin, length in spans]
    counted = sum(any(begin <= moment < end for begin, end in intervals) for moment in range(100))
    assert covered(intervals, 0, 100) == counted


@pytest.mark.parametrize(
    ("name", "on_gpu", "expected"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", True, True),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t", True, True),
        ("nccl:all_reduce", True, False),  # an annotation around the kernel, which is longer than it
        ("nccl:all_reduce", False, False),  # the host asking for it
        ("void at::native::vectorized_elementwise_kernel<4>", True, False),
        ("gloo:all_reduce", False, True),
        ("gloo:send", False, True),
        ("c10d::allreduce_", False, False),
        ("aten::mm", False, False),
    ],
)
def test_what_is_communication(name, on_gpu, expected):
    assert is_communication(name, on_gpu) is expected
