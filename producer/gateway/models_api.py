"""GET /v1/models: what the pool serves."""

from typing import Annotated, Literal

import msgspec
from fastapi import APIRouter, Depends

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


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """All models of the pool."""

    object: Literal["list"] = "list"
    data: list[Model]


@router.get("", responses=answers(ModelList))
async def list_models(
    _caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> StructResponse:
    """Lists the models that are configured or were ever served, by name."""
    found = await owner.client.models()
    return StructResponse(ModelList(data=[_shown(info) for info in found]))


@router.get("/{model:path}", responses=answers(Model, 404))
async def retrieve_model(
    model: str,
    _caller: Annotated[Caller, Depends(require(Scope.INFERENCE))],
    owner: Annotated[Gateway, Depends(gateway)],
) -> StructResponse:
    """Shows one model; its name may hold slashes."""
    for info in await owner.client.models():
        if info.name == model:
            return StructResponse(_shown(info))
    raise ApiError(
        404,
        f"the model '{model[:96]}' is not known to this pool; GET /v1/models lists all",
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
