"""Adapters of a model: how requests name them, and what a pool knows of each. Pure.

An adapter is a LoRA checkpoint that is served on top of a model that is loaded anyway.
People name it; a job carries the digest of its files as well, so that it gets the same
weights however often it is run (docs/adr/0032-adapters-are-named-by-digest.md).
"""

import re
from collections.abc import Iterable
from typing import Final, Literal

import msgspec

from .adapter_names import ADAPTER_NAME
from .errors import InvalidRequest, UnknownAdapter
from .messages import AdapterRef
from .typed import shown

DIGEST: Final = re.compile(r"[0-9a-f]{64}")
RETIRED_MS: Final = 7 * 86_400_000
"""How long one that was replaced or removed stays known, for jobs that had begun."""
CHECK: Final = "adapter-check "
"""Begins a message on a worker's control channel; the id of a check follows."""
MOST_IN_MEMORY: Final = 64
"""Adapters that a worker says it has in memory, so that its heartbeats stay small."""
_SHORT: Final = 16
"""Digits of a digest that tell adapters apart where a mistake costs one load."""
_LISTED: Final = 20


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a pool knows of an adapter: an entry of the hash `tm:adapters:<model>`."""

    v: int = 1
    name: str
    model: str
    path: str
    """Directory of the checkpoint, as workers see it."""
    digest: str
    """SHA-256 of its files, in hex."""
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()
    """Linear layers that it changes."""
    bytes: int
    """Of its weights on disk."""
    base: str = ""
    """Weights of the worker that checked it."""
    checked: dict[str, str] = {}
    """Other weights whose workers were asked -> why they cannot serve it; empty: they
    can."""
    notes: tuple[str, ...] = ()
    """What whoever added it was warned of."""
    tenant: str | None = None
    """The only tenant that may use it; None: all."""
    added_ms: int = 0
    """By the clock of Redis."""
    retired: Literal["replaced", "removed"] | None = None
    retired_ms: int | None = None

    @property
    def ref(self) -> AdapterRef:
        """As a request names it."""
        return AdapterRef(self.name, self.digest)

    def is_for(self, tenant: str) -> bool:
        """Whether jobs of a tenant may use it."""
        return self.tenant in (None, tenant)


class AdapterCheck(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker is asked to look at before a name becomes visible."""

    v: int = 1
    path: str


class AdapterVerdict(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker found: facts, or what is wrong."""

    v: int = 1
    problem: str | None = None
    base: str = ""
    """Weights of the worker."""
    digest: str = ""
    rank: int = 0
    alpha: float = 0.0
    targets: tuple[str, ...] = ()
    bytes: int = 0
    notes: tuple[str, ...] = ()
    """Warnings: what cannot be told from the files."""


def card_of(
    verdict: AdapterVerdict, *, name: str, model: str, path: str, tenant: str | None
) -> AdapterCard:
    """Returns the card of a checkpoint that a worker has found good.

    Args:
        verdict: Without a problem.
        name: By which requests are to ask for it.
        model: Its base.
        path: Directory of the checkpoint.
        tenant: The only one that may use it; None: all.
    """
    return AdapterCard(
        name=name,
        model=model,
        path=path,
        digest=verdict.digest,
        rank=verdict.rank,
        alpha=verdict.alpha,
        targets=verdict.targets,
        bytes=verdict.bytes,
        base=verdict.base,
        notes=verdict.notes,
        tenant=tenant,
    )


def key_of(ref: AdapterRef) -> str:
    """Returns what an engine, and its prefix cache, know an adapter by."""
    return f"{ref.name}@{ref.digest}"


def short_digest(digest: str) -> str:
    """Returns what workers and schedulers call an adapter among themselves."""
    return digest[:_SHORT]


def in_memory(keys: Iterable[str]) -> frozenset[str]:
    """Returns what a worker says of the adapters that it has in memory.

    Args:
        keys: As `key_of` made them, those used last at the end.
    """
    newest = list(keys)[-MOST_IN_MEMORY:]
    return frozenset(short_digest(key.rpartition("@")[2]) for key in newest)


def check_name(name: str, field: str = "adapter") -> None:
    """Refuses what cannot be an adapter's name.

    Raises:
        InvalidRequest: It has other characters, or too many.
    """
    if not ADAPTER_NAME.fullmatch(name):
        raise InvalidRequest(
            field,
            f"{shown(name)} cannot be an adapter's name; expected 1 to 64 letters, "
            "digits and . _ -, beginning with a letter, a digit or _",
        )


def check_ref(ref: AdapterRef) -> None:
    """Refuses what a client has written where a request names an adapter.

    Raises:
        InvalidRequest: Name or digest is of the wrong form.
    """
    check_name(ref.name, "adapter.name")
    if not DIGEST.fullmatch(ref.digest):
        raise InvalidRequest(
            "adapter.digest",
            f"{shown(ref.digest)} is no digest; expected 64 hex digits, as the "
            "adapter's card in tm:adapters:<model> has them",
        )


def unknown_adapter(model: str, name: str, known: Iterable[str]) -> UnknownAdapter:
    """Returns the error of a name that a model has not, with those that it has.

    Args:
        model: The model's public name.
        name: What was asked for.
        known: Names that whoever asks may use.
    """
    names = sorted(known)
    listed = ", ".join(names[:_LISTED]) or "none; `tokenmill lora add` registers one"
    if len(names) > _LISTED:
        listed += f" and {len(names) - _LISTED} more"
    return UnknownAdapter(
        "adapter",
        f"{shown(name)} is no adapter of the model '{model}'; it has {listed}",
    )


def name_in_use(before: AdapterCard, new: AdapterCard) -> InvalidRequest:
    """Returns the error of a name that another adapter has.

    Args:
        before: Who has it.
        new: Who was to have it.
    """
    whose = "" if before.tenant is None else f", of the tenant '{before.tenant}'"
    way = ", or replace it (--replace)" if before.tenant == new.tenant else ""
    return InvalidRequest(
        "name",
        f"'{before.name}' is in use for the model '{before.model}' (from "
        f"{before.path}, digest {before.digest[:12]}{whose}); choose another name or "
        f"remove it first{way}",
    )


def not_theirs(before: AdapterCard, new: AdapterCard) -> InvalidRequest:
    """Returns the error of a name that is somebody else's until it is removed.

    Args:
        before: Who has it.
        new: Who was to have it.
    """
    return InvalidRequest(
        "tenant",
        f"'{before.name}' of the model '{before.model}' is for {_users(before)}, and "
        f"cannot be replaced by one for {_users(new)}: jobs that use it would fail; "
        "replace it for the same, choose another name, or remove it first (tokenmill "
        "lora remove)",
    )


def _users(card: AdapterCard) -> str:
    return "all tenants" if card.tenant is None else f"the tenant '{card.tenant}'"
