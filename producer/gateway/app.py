"""The application: every router, the middle layer, the handlers of errors."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ... import __version__
from . import (
    batches_api,
    bulk_api,
    dashboard,
    files_api,
    health,
    jobs_api,
    models_api,
    openai_api,
    usage_api,
)
from .context import Gateway
from .errors import install_handlers
from .limits import Limits
from .metrics import CountRequests, show
from .openapi_document import document
from .request_log import RequestLog
from .running import JOB_HEADER

if TYPE_CHECKING:
    from ...shared.config import Config, GatewayConfig


def create_app(config: "Config", url: str) -> FastAPI:
    """Returns the gateway's application.

    Args:
        config: Settings in force.
        url: Where the pool's Redis is.
    """
    owner = Gateway(config, url)

    @asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        async with owner.running():
            yield

    app = FastAPI(
        title="tokenmill",
        version=__version__,
        description="OpenAI's API over a worker pool, and the pool's own jobs.",
        lifespan=lifespan,
        redirect_slashes=False,
        # The pages of FastAPI load their scripts from other hosts.
        docs_url=None,
        redoc_url=None,
    )
    app.state.gateway = owner
    install_handlers(app)
    _add_layers(app, config.gateway)
    app.include_router(health.router)
    app.include_router(openai_api.router)
    app.include_router(models_api.router)
    app.include_router(jobs_api.router)
    app.include_router(files_api.router)
    app.include_router(batches_api.router)
    app.include_router(bulk_api.router)
    app.include_router(usage_api.router)
    owner.background(owner.files.clean_for_ever)
    owner.background(owner.batches.run)
    owner.background(lambda: show(owner))
    dashboard.install(app, owner)
    document(app)
    return app


def _add_layers(app: FastAPI, settings: "GatewayConfig") -> None:
    """Adds what stands before the endpoints; the last one is the outermost."""
    app.add_middleware(Limits, settings=settings)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=["Retry-After", "X-Request-Id", JOB_HEADER],
        )
    app.add_middleware(RequestLog)
    app.add_middleware(CountRequests)
