"""GET /v1/models: what the pool serves."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends

from ...shared.adapter_names import full_name, split_name
from ...shared.adapters import AdapterCard
from ...shared.api_keys import Scope
from ..info import ModelInfo
from .auth import Caller, require
from .context import Gateway, gateway
from .documented import StructResponse, answers
from .errors import ApiError

router = APIRouter(prefix="/v1/models", tags=["openai"])


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """A model that the pool serves, or is to serve."""

    id: str
    object: Literal["model"] = "model"
    created: int = 0
    """Unix time; not known of a model."""
    owned_by: str = "tokenmill"
    workers: int
    """Live worker groups; 0: requests are refused until one starts."""
    max_context: int | None
    """Most tokens of prompt and output; null until a worker has said."""
    has_chat_template: bool | None
    weights_version: str | None
    parent: str | None = None
    """Of an adapter: its base model."""


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models of the pool."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", responses=answers(ModelList))
async def list_models(
    caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> StructResponse:
    """Lists the models that are configured or were ever served, by name.

    Each is followed by those of its adapters that the caller's jobs may use.
    """
    data: list[Model] = []
    for info in await owner.client.models():
        data.append(_shown(info))
        cards = await owner.client.adapters(info.name, tenant=caller.tenant)
        data += [_adapted(info, card) for card in cards]
    return StructResponse(ModelList(data=data))


@router.get("/{model:path}", responses=answers(Model, 404))
async def retrieve_model(
    model: str,
    caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> StructResponse:
    """Shows one model; its name may hold slashes."""
    base, adapter = split_name(model)
    for info in await owner.client.models():
        if info.name != base:
            continue
        if adapter is None:
            return StructResponse(_shown(info))
        for card in await owner.client.adapters(base, tenant=caller.tenant):
            if card.name == adapter:
                return StructResponse(_adapted(info, card))
    raise ApiError(
        404,
        f"the model '{model[:161]}' is not known to this pool; GET /v1/models lists "
        "all",
        code="model_not_found",
        param="model",
    )


def _shown(info: ModelInfo) -> Model:
    card = info.card
    return Model(
        id=info.name,
        workers=info.num_groups,
        max_context=card.max_context if card else None,
        has_chat_template=card.has_chat_template if card else None,
        weights_version=card.weights_version if card else None,
    )


def _adapted(info: ModelInfo, card: AdapterCard) -> Model:
    base = _shown(info)
    return msgspec.structs.replace(
        base,
        id=full_name(info.name, card.name),
        created=card.added_ms // 1000,
        parent=info.name,
    )
