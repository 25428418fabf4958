"""The order in which waiting batches are begun."""

from collections import Counter

from tokenmill.producer.gateway.batches_models import BatchRecord
from tokenmill.producer.gateway.batches_open import in_turn


def record(tenant: str, created_ms: int) -> BatchRecord:
    return BatchRecord(
        id=f"{tenant}{created_ms}",
        tenant=tenant,
        run="r" * 10,
        endpoint="/v1/completions",
        input_file_id="in",
        output_id="out",
        error_id="errors",
        created_ms=created_ms,
        expires_ms=2**50,
    )


def test_tenants_take_turns_and_the_oldest_goes_first() -> None:
    free = [record("a", at) for at in (1, 2, 3)] + [record("b", at) for at in (9, 8)]
    assert [r.id for r in in_turn(free, Counter())] == ["a1", "b8", "a2", "b9", "a3"]


def test_who_has_much_already_waits() -> None:
    free = [record("a", 1), record("b", 9), record("b", 10)]
    busy = Counter(a=2)
    assert [r.id for r in in_turn(free, busy)] == ["b9", "b10", "a1"]
    assert busy == Counter(a=2)
