"""What a pool accepts, known before the first line is read."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ...shared.adapter_names import split_name
from ...shared.adapters import AdapterCard, unknown_adapter
from ...shared.bulk.messages import RunSpec
from ...shared.errors import InvalidRequest
from ...shared.messages import ModelCard, PoolCard, Prompt
from ...shared.validate import validate_prompt
from ..pool_view import default_of

if TYPE_CHECKING:
    from ..client import Client


class Accepted(msgspec.Struct, frozen=True):
    """A pool's limits and models."""

    card: PoolCard
    models: Mapping[str, ModelCard | None]
    """Every model that is configured or was ever served."""
    adapters: tuple[AdapterCard, ...] = ()
    """Those that the run's tenant may use."""

    @property
    def max_text_bytes(self) -> int:
        """Of one prompt."""
        with_store = self.card.max_input_bytes if self.card.storage_url else 0
        return max(self.card.max_payload_bytes, with_store)

    @property
    def default_model(self) -> str:
        """Which is meant where none is named."""
        return default_of(self.card, self.models)

    def max_context(self, model: str) -> int | None:
        """Returns most tokens of prompt and output, where a worker has told."""
        card = self.models.get(split_name(model)[0])
        return None if card is None else card.max_context

    def check_model(self, model: str) -> None:
        """Refuses a model of which this pool has never heard: it would wait for ever.

        Raises:
            InvalidRequest: It is not among those of the pool.
        """
        if self.models and model not in self.models:
            raise InvalidRequest(
                "model",
                f"'{model[:96]}' is not known to this pool; it has "
                f"{', '.join(sorted(self.models))}",
            )

    def check_adapter(self, model: str, adapter: str | None) -> None:
        """Refuses an adapter that the model does not have.

        Raises:
            UnknownAdapter: The run's tenant may use none of that name.
        """
        known = {one.name for one in self.adapters if one.model == model}
        if adapter is not None and adapter not in known:
            raise unknown_adapter(model, adapter, known)

    def check_spec(self, spec: RunSpec, *, is_new: bool = True) -> None:
        """Refuses a run that could not be done in this pool.

        Args:
            spec: What it is to do.
            is_new: It is to begin; one that has begun may outlive its adapter.

        Raises:
            InvalidRequest: A field is wrong; the message names it.
        """
        queued = Prompt(
            "-", tenant=spec.tenant, priority=spec.priority, webhook=spec.webhook
        )
        validate_prompt(queued, None, self.card)
        writes = spec.kind == "summarize" and spec.mode == "abstractive"
        if writes or spec.adapter is not None:
            self.check_model(spec.base)
        if is_new:
            self.check_adapter(spec.base, spec.adapter)

    def check(self, prompt: Prompt) -> None:
        """Refuses a prompt that could not run.

        Raises:
            InvalidRequest: A field is wrong, or the model is not of this pool.
        """
        self.check_model(prompt.model)
        card = self.models.get(prompt.model)
        validate_prompt(prompt, card, self.card, self.max_text_bytes)
        self.check_adapter(prompt.model, prompt.adapter)


async def accepted_by(client: "Client", tenant: str) -> Accepted:
    """Reads what a pool accepts.

    Args:
        client: An open client.
        tenant: Of whom; adapters may be one's own.
    """
    session = client.session
    card = await session.patiently(session.view.pool)
    models = {info.name: info.card for info in await client.models()}
    return Accepted(card, models, tuple(await client.adapters(tenant=tenant)))
