"""What a refusal of a change of versions advises; what is advised is allowed."""

import pytest

from tokenmill.shared.config_model import ModelConfig
from tokenmill.shared.errors import VersionConflict
from tokenmill.shared.version_changes import moved, rolled_back, switched
from tokenmill.shared.version_records import VersionSpec, VersionState
from tokenmill.shared.version_retiring import drained
from tokenmill.shared.versions import Route

READY = {"a-trial": "ready", "v2": "ready", "v3": "ready"}


def specs_of(states: dict[str, VersionState]) -> dict[str, VersionSpec]:
    return {
        name: VersionSpec(version=name, model=ModelConfig(name="chat"), state=state)
        for name, state in states.items()
    }


@pytest.mark.parametrize(
    ("shares", "states", "hint"),
    [
        ({"v2": 60, "v3": 40}, READY, "switch chat v3 --percent 0, which .*(v2)"),
        (
            {"v1": 10, "v2": 50, "v3": 40},
            READY,
            r"switch chat v3 --percent 0, which .*\(v2, v1\)",  # v1 is nobody's
        ),
        (
            {"v1": 50, "v2": 10, "v3": 40},
            {**READY, "v1": "failed"},
            "switch chat v2$",
        ),
        ({"v3": 100}, {"v2": "ready", "v3": "ready"}, "switch chat v2$"),
        ({"v3": 100}, READY, "switch chat VERSION, .*: a-trial or v2$"),
        ({"v3": 100}, {"v3": "ready", "v2": "failed"}, "the only one that could"),
    ],
)
def test_a_refused_drain_advises_what_does_not_raise_a_trial(
    shares: dict[str, float], states: dict[str, VersionState], hint: str
) -> None:
    route, specs = Route(shares=shares), specs_of(states)
    with pytest.raises(VersionConflict, match=hint):
        drained("chat", "v3")(route, specs, 1)


def test_what_is_advised_divides_the_share_among_those_that_serve() -> None:
    route = Route(shares={"v1": 20, "v2": 40, "v3": 40})
    specs = specs_of({"a-trial": "ready", "v2": "ready", "v3": "ready"})
    change = moved("chat", "v3", 0)(route, specs, 1)
    assert change is not None
    assert change.route.shares == {"v1": 33.33, "v2": 66.67}
    assert drained("chat", "v3")(change.route, specs, 2) is not None
    assert switched("chat", {"v2": 100})(route, specs, 1) is not None


def test_a_rollback_without_a_route_says_who_serves() -> None:
    with pytest.raises(VersionConflict, match="jobs go to any of its versions: say"):
        rolled_back("chat", Route())(Route(), {}, 1)
