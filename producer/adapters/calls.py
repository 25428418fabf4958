"""Adapters as methods of both clients."""

from pathlib import Path
from typing import TYPE_CHECKING

from ...shared.adapter_names import split_name
from ...shared.errors import InvalidRequest, UnknownAdapter
from ...shared.keys import MODEL_NAME
from ...shared.validate import TENANT
from ..session import Session

if TYPE_CHECKING:
    from ...shared.adapters import AdapterCard
    from ..client import Client
    from ..sync import LoopThread


class AdapterCalls:
    """What `Client` can do with adapters."""

    @property
    def _session(self) -> Session:
        raise NotImplementedError

    async def add_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        model: str | None = None,
        tenant: str | None = None,
        replace: bool = False,
        force: bool = False,
    ) -> "AdapterCard":
        """Registers a LoRA adapter, once a worker of each version that serves read it.

        Args:
            name: By which requests ask for it.
            path: Directory of the checkpoint, as workers see it.
            model: The base; None is the pool's only model, or the default one.
            tenant: The only one that may use it; None: all.
            replace: Take the name from another adapter. Jobs that are enqueued keep
                that one, as long as its files stay where they are.
            force: Even if a version that gets a part of the jobs cannot serve it.

        Returns:
            What is known of it.

        Raises:
            InvalidRequest: The name is in use, or the checkpoint cannot be served; the
                message says why.
            ModelUnavailable: No live worker serves the model.
            ResultTimeout: No worker has answered.
        """
        from ...shared.adapters import card_of, check_name
        from ...shared.adapters_registry import AdapterRegistry
        from .asking import verdict_of
        from .fitting import ask_the_others

        check_name(name, "name")
        if tenant is not None and not TENANT.fullmatch(tenant):
            raise InvalidRequest("tenant", f"{tenant[:80]!r} cannot be a tenant")
        session = self._session
        base = await self._base(model)
        place = _absolute(path)
        verdict = await verdict_of(session, base, place)
        if verdict.problem is not None:
            raise InvalidRequest("adapter", f"'{name}' is refused: {verdict.problem}")
        card = card_of(verdict, name=name, model=base, path=place, tenant=tenant)
        others = await ask_the_others(session, base, place, verdict.base)
        card = others.noted_on(card, force=force)
        registry = AdapterRegistry(session.redis, base)
        return await session.patiently(lambda: registry.add(card, replace=replace))

    async def adapters(
        self, model: str | None = None, *, tenant: str | None = None
    ) -> "list[AdapterCard]":
        """Returns the adapters that are registered, by model and name.

        Args:
            model: Of one model, or of all that the pool knows.
            tenant: Only those that its jobs may use.

        Raises:
            ProtocolError: A registry cannot be read.
        """
        from ...shared.adapters_registry import AdapterRegistry

        session = self._session
        names = [model] if model is not None else await self._names()
        found: list[AdapterCard] = []
        for name in names:
            registry = AdapterRegistry(session.redis, name)
            found += await session.patiently(registry.cards)
        return [card for card in found if tenant is None or card.is_for(tenant)]

    async def remove_adapter(
        self, name: str, *, model: str | None = None
    ) -> "AdapterCard":
        """Takes an adapter's name away.

        Jobs that have begun with it go on; those that wait fail and say so.

        Args:
            name: As it was registered.
            model: Its base; None is the pool's only model, or the default one.

        Returns:
            What stood under the name.

        Raises:
            UnknownAdapter: Nothing does.
        """
        from ...shared.adapters_registry import AdapterRegistry

        session = self._session
        registry = AdapterRegistry(session.redis, await self._base(model))
        before = await session.patiently(lambda: registry.card(name))
        tries = 0

        async def removed() -> "AdapterCard":
            nonlocal tries
            tries += 1
            try:
                return await registry.remove(name)
            except UnknownAdapter:
                if tries < 2 or before is None:
                    raise
                return before  # the reply to a try before was lost

        return await session.patiently(removed)

    async def _base(self, model: str | None) -> str:
        session = self._session
        if model is None:
            return await session.patiently(session.view.default_model)
        if not MODEL_NAME.fullmatch(model):
            named, adapter = split_name(model)
            hint = f"; the base is '{named}'" if adapter is not None else ""
            raise InvalidRequest(
                "model", f"{model[:96]!r} cannot be a model's name{hint}"
            )
        return model

    async def _names(self) -> list[str]:
        from ...shared.keys import MODELS

        session = self._session
        pool = await session.patiently(session.view.pool)
        (known,) = await session.read(("HKEYS", MODELS))
        return sorted({*pool.models, *(name.decode() for name in known)})


def _absolute(path: str | Path) -> str:
    return str(Path(path).expanduser().absolute())


class SyncAdapterCalls:
    """The same for `SyncClient`."""

    _client: "Client"

    @property
    def _thread(self) -> "LoopThread":
        raise NotImplementedError

    def add_adapter(
        self,
        name: str,
        path: str | Path,
        *,
        model: str | None = None,
        tenant: str | None = None,
        replace: bool = False,
        force: bool = False,
    ) -> "AdapterCard":
        """Registers a LoRA adapter; see `Client.add_adapter`."""
        return self._thread.run(
            self._client.add_adapter(
                name, path, model=model, tenant=tenant, replace=replace, force=force
            )
        )

    def adapters(
        self, model: str | None = None, *, tenant: str | None = None
    ) -> "list[AdapterCard]":
        """Returns the adapters that are registered; see `Client.adapters`."""
        return self._thread.run(self._client.adapters(model, tenant=tenant))

    def remove_adapter(self, name: str, *, model: str | None = None) -> "AdapterCard":
        """Takes an adapter's name away; see `Client.remove_adapter`."""
        return self._thread.run(self._client.remove_adapter(name, model=model))
