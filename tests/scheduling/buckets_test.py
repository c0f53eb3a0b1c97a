from __future__ import annotations

import pytest

from serving.scheduling.buckets import BUCKETS, bucket_for


@pytest.mark.parametrize("bucket", BUCKETS)
def test_an_input_as_long_as_a_bucket_falls_into_it(bucket: int) -> None:
    """The bounds are inclusive: one token more is the next bucket, which is twice as long."""
    assert bucket_for(bucket) == bucket
    assert bucket_for(bucket + 1) == 2 * bucket


@pytest.mark.parametrize(("tokens", "bucket"), [(513, 1024), (1024, 1024), (1025, 2048), (8192, 8192), (8193, 16384)])
def test_buckets_go_on_doubling_beyond_the_table(tokens: int, bucket: int) -> None:
    """Models that take more than 512 tokens have buckets too."""
    assert bucket_for(tokens) == bucket


def test_the_shortest_inputs_share_a_bucket() -> None:
    """Everything up to 16 tokens is together."""
    assert {bucket_for(tokens) for tokens in range(1, 17)} == {16}


def test_a_bucket_holds_its_input_and_wastes_less_than_half() -> None:
    """Beyond the shortest, padding to the bucket never doubles an input's length."""
    for tokens in range(17, 5000):
        assert tokens <= bucket_for(tokens) < 2 * tokens
