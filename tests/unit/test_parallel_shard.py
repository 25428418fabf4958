"""Which ranks a model can be split over, and who gets what."""

import itertools
import subprocess
import sys

import pytest

from tokenmill.shared.errors import ModelLoadError
from tokenmill.workers.engine.parallel.shard import (
    Shard,
    check_degree,
    degrees,
    head_counts,
    heads_of,
    share_of,
)

BUILT_IN = {
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (BUILT_IN, (1, 3, 9)),
        ({"num_attention_heads": 32, "num_key_value_heads": 8}, (1, 2, 4, 8, 16, 32)),
        ({"num_attention_heads": 32}, (1, 2, 4, 8, 16, 32)),
        ({"num_attention_heads": 12, "num_key_value_heads": 4}, (1, 2, 4, 12)),
        ({"model_type": "gpt2", "n_head": 12}, (1, 2, 3, 4, 6, 12)),
        ({"model_type": "falcon", "num_attention_heads": 71}, (1, 71)),
        (
            {
                "model_type": "falcon",
                "num_attention_heads": 8,
                "num_kv_heads": 2,
                "new_decoder_architecture": True,
            },
            (1, 2, 4, 8),
        ),
    ],
)
def test_degrees_that_work(config, expected) -> None:
    assert degrees(config) == expected
    for size in expected:
        check_degree(config, size)


def test_other_degrees_are_refused_with_those_that_work() -> None:
    with pytest.raises(ModelLoadError, match=r"tp=2 .* 9 query heads and 3 KV") as told:
        check_degree(BUILT_IN, 2)
    assert str(told.value).endswith("degrees that work are 1, 3, 9")


@pytest.mark.parametrize(
    "config", [{}, {"num_attention_heads": "nine"}, {"num_attention_heads": 0}]
)
def test_a_configuration_without_heads_is_refused(config) -> None:
    with pytest.raises(ModelLoadError, match="num_attention_heads"):
        degrees(config)


def test_falcons_are_multi_query_unless_they_say_otherwise() -> None:
    falcon = {"model_type": "falcon", "num_attention_heads": 8}
    assert head_counts(falcon) == (8, 1)
    assert head_counts({**falcon, "multi_query": False}) == (8, 8)


def test_fewer_kv_heads_than_ranks_are_kept_by_several() -> None:
    config = {"num_attention_heads": 8, "num_key_value_heads": 2}
    shares = [heads_of(config, Shard(rank, 4)) for rank in range(4)]
    assert [share.queries for share in shares] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert [share.keys for share in shares] == [(0, 1), (0, 1), (1, 2), (1, 2)]


@pytest.mark.parametrize("total", [8, 83, 259, 11008, 50257, 152064])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_shares_cover_a_width_once_and_are_even(total, size) -> None:
    shares = [share_of(total, Shard(rank, size)) for rank in range(size)]
    assert shares[0][0] == 0
    assert shares[-1][1] == total
    for left, right in itertools.pairwise(shares):
        assert left[1] == right[0]
    widths = [stop - start for start, stop in shares]
    assert min(widths) >= 1
    assert max(widths) - min(widths) < 2 * 64


def test_a_rank_beyond_its_group_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="ranks from 0 to 1"):
        Shard(2, 2)


def test_advice_about_degrees_needs_no_torch() -> None:
    code = (
        "import sys\n"
        "from tokenmill.workers.engine.parallel.shard import degrees\n"
        "assert degrees({'num_attention_heads': 9, 'num_key_value_heads': 3})\n"
        "assert 'torch' not in sys.modules\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
