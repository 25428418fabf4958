"""What stands in Redis of a model's versions, besides the route."""

from typing import Final, Literal, TypeVar

import msgspec

from .config_model import ModelConfig
from .errors import ProtocolError
from .health_set import HealthReport, HealthSet
from .messages import FIRST_VERSION, SCHEMA_VERSION
from .routes import Route

VersionState = Literal["added", "loading", "ready", "failed", "draining", "stopped"]
ROUTE: Final = "route"
"""Field of `tm:versions:<model>`."""
SPEC: Final = "spec:"
"""Beginning of the fields of versions."""
RUNNING: Final[tuple[VersionState, ...]] = ("loading", "ready", "draining")
"""States in which a version has workers, or is to have them."""
MAY_RUN: Final = ("added", "loading", "ready", "draining")
"""States in which jobs that were begun with a version's weights wait for it."""


class VersionSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One version of a model: field `spec:<version>` of `tm:versions:<model>`."""

    v: int = FIRST_VERSION
    version: str
    model: ModelConfig
    """What its workers load; its `version` is this one."""
    state: VersionState = "added"
    reason: str = ""
    """Why it is in this state, where that is not a matter of course."""
    failures: dict[str, str] = {}
    """Host -> why it cannot load the version; others may have it all the same."""
    load_ms: int = 0
    """When it was last told to load, by the clock of Redis: all hosts try again."""
    weights_version: str | None = None
    """Of its workers, once one has loaded."""
    health: HealthSet | None = None
    """What must pass before it is ready; None: to load is enough."""
    health_report: HealthReport | None = None
    created_ms: int = 0
    """By the clock of Redis, as the next."""
    updated_ms: int = 0


_Record = TypeVar("_Record", Route, VersionSpec)


def decode_route(raw: bytes | None, key: str) -> Route:
    """Returns a route as it stands in Redis; one of nobody where there is none.

    Args:
        raw: Field `route`.
        key: Of the hash, for the error.

    Raises:
        ProtocolError: It is none of ours, or of a later version.
    """
    return Route() if raw is None else _decoded(raw, Route, f"{key}, field {ROUTE}")


def decode_spec(raw: bytes, key: str) -> VersionSpec:
    """Returns a version as it stands in Redis.

    Args:
        raw: Field `spec:<version>`.
        key: Of the hash, for the error.

    Raises:
        ProtocolError: It is none of ours, or of a later version.
    """
    return _decoded(raw, VersionSpec, f"{key}, a field {SPEC}…")


def _decoded(raw: bytes, kind: type[_Record], what: str) -> _Record:
    try:
        record = msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ProtocolError(f"{what} cannot be read: {error}") from None
    if record.v > SCHEMA_VERSION:
        raise ProtocolError(
            f"{what} has schema version {record.v}; this process reads up to "
            f"{SCHEMA_VERSION}: upgrade tokenmill here"
        )
    return record
