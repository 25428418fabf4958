"""A process of the pool shows itself: its card in Redis, its metrics over HTTP."""

import asyncio
import contextlib
import importlib
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

import msgspec
import structlog

from ..announcing import keep_announced
from ..config import Config, MetricsConfig
from ..outage import REDIS_ERRORS
from ..process_card import Kind, ProcessCard, make_card
from ..tasks import end_tasks
from .catalog import REDIS_AWAY
from .labels import know

if TYPE_CHECKING:
    from wsgiref.simple_server import WSGIServer

    import redis.asyncio

Refresh = Callable[[], None]
Ask = Callable[[], Awaitable[None]]

ASK_S: Final = 2.0
"""A scrape waits this long for what has to be asked of Redis; then it goes without."""
_EVERYWHERE: Final = ("0.0.0.0", "::", "")  # noqa: S104 - what a setting may say
_log = structlog.get_logger(__name__)


async def preload(config: Config) -> None:
    """Loads the library early, so that `collector.settle` leaves it out of collections.

    Args:
        config: Settings; nothing is loaded where metrics are off.
    """
    if config.metrics.enabled:
        with contextlib.suppress(ImportError):  # `shown` says so, with the cure
            await asyncio.to_thread(importlib.import_module, "prometheus_client")


@contextlib.asynccontextmanager
async def shown(
    client: "redis.asyncio.Redis",
    config: Config,
    kind: Kind,
    *,
    name: str | None = None,
    models: Iterable[str] = (),
    refresh: Sequence[Refresh] = (),
    ask: Ask | None = None,
    address: str | None = None,
) -> AsyncIterator[ProcessCard]:
    """Announces this process and serves its metrics, for the length of a block.

    Args:
        client: Redis.
        config: Settings; `metrics` says where and whether, `models` what may be a
            label.
        kind: What this process is.
        name: Its id; None draws one.
        models: Further models that may be labels.
        refresh: Called at each scrape, on another thread.
        ask: Awaited at each scrape, on this loop, before the gauges are read.
        address: Where this process answers over HTTP besides, if it is a gateway.
    """
    know(model.name for model in config.models)
    know(models)
    REDIS_AWAY.add(by=0)
    card = make_card(kind, name=name, address=address)
    before = [*refresh]
    if ask is not None:
        before.append(_on_loop(ask, asyncio.get_running_loop()))
    showing = asyncio.create_task(_show(client, config, card, before), name="shown")
    try:
        yield card
    finally:
        await end_tasks(showing)


async def _show(
    client: "redis.asyncio.Redis",
    config: Config,
    card: ProcessCard,
    refresh: Sequence[Refresh],
) -> None:
    """Serves and announces until cancelled.

    Off the loop: the library loads and binds meanwhile, and binding may ask a slow
    name server.
    """
    server, url = await asyncio.to_thread(_serve, config.metrics, card, refresh)
    try:
        if url is not None:
            _log.info("metrics_served", url=url)
        await keep_announced(client, msgspec.structs.replace(card, metrics_url=url))
    finally:
        if server is not None:
            # Its loop notices within half a second; nobody's end waits for that.
            threading.Thread(target=_stop, args=(server,), daemon=True).start()


def _stop(server: "WSGIServer") -> None:
    server.shutdown()
    server.server_close()


def _on_loop(ask: Ask, loop: asyncio.AbstractEventLoop) -> Refresh:
    """Returns a call for the scrape's thread that runs `ask` where Redis is used."""

    async def asked() -> None:
        try:
            async with asyncio.timeout(ASK_S):
                await ask()
        except REDIS_ERRORS as error:
            _log.debug("scrape_without_redis", error=str(error) or repr(error))
        except Exception:  # noqa: BLE001 - all else that is shown needs nobody asked
            _log.exception("scrape_incomplete")

    def refresh() -> None:
        work = asked()
        try:
            asyncio.run_coroutine_threadsafe(work, loop).result(2 * ASK_S)
        except TimeoutError:
            _log.warning("scrape_did_not_wait", reason="the process's loop is busy")
        except RuntimeError:
            work.close()  # the loop has ended: the process is leaving

    return refresh


def _serve(
    config: MetricsConfig, card: ProcessCard, refresh: Sequence[Refresh]
) -> tuple["WSGIServer | None", str | None]:
    """Starts the server on a thread; a process works without it all the same."""
    if not config.enabled:
        return None, None
    try:
        from prometheus_client import start_http_server

        from .exposition import make_registry
    except ImportError as error:
        _log.warning(
            "metrics_off",
            reason=str(error),
            cure="pip install 'tokenmill[scheduler]' (or worker, gateway)",
        )
        return None, None
    registry = make_registry(card, refresh)
    for port in dict.fromkeys((config.port, 0)):
        try:
            server, _ = start_http_server(port, config.host, registry)
        except OSError as error:
            # Another process of this host may have the port: then a free one.
            _log.warning(
                "metrics_port_taken", host=config.host, port=port, error=str(error)
            )
        else:
            return server, _url(config.host, server.server_port)
    return None, None


def _url(host: str, port: int) -> str:
    """Where other hosts find it, if it listens beyond its own."""
    name = socket.gethostname() if host in _EVERYWHERE else host
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/metrics"
