"""Room that a bulk run must leave to others, as `doctor` sees it."""

from tokenmill.shared.config import BulkConfig, Config, LimitsConfig, TenantConfig
from tokenmill.shared.pool.bulk_checks import room_beside_bulk


def test_the_defaults_leave_room_beside_a_run() -> None:
    assert room_beside_bulk(Config()) == []


def test_a_limit_that_one_run_fills_is_named_with_a_cure() -> None:
    config = Config(
        limits=LimitsConfig(tenant_waiting_jobs=40),
        bulk=BulkConfig(max_open_jobs=100),
        tenants={
            "small": TenantConfig(waiting_jobs=100),
            "large": TenantConfig(waiting_jobs=500),
            "usual": TenantConfig(),
        },
    )
    found = room_beside_bulk(config)
    assert {one.severity for one in found} == {"warning"}
    assert [one.message.split(" is ")[0] for one in found] == [
        "tenants.small.waiting_jobs",
        "limits.tenant_waiting_jobs",
    ]
    assert "well above bulk.max_open_jobs" in found[1].cure
