"""What `tokenmill doctor` says of the store of large inputs, as reached from here."""

from ..config import Config
from ..errors import StorageUnavailable
from ..messages import PoolCard
from ..redis import Finding


def _is_within(told: str | None, url: str | None) -> bool:
    """Whether producers are told of a directory in the store of the settings here."""
    return url is None or f"{told}/".startswith(f"{url.rstrip('/')}/")


async def examine_storage(card: PoolCard | None, config: Config) -> Finding:
    """Writes to the store and reads from it.

    Args:
        card: What the pool tells its producers, when there is one.
        config: This host's settings.
    """
    told = card.storage_url if card is not None else None
    url = told or config.storage.url
    if url is None:
        most = card.max_payload_bytes if card is not None else 0
        most = most or config.limits.max_payload_bytes
        message = f"none: requests of more than {most} bytes are refused"
        return Finding("info", "storage", message)
    if card and not _is_within(told, config.storage.url):
        return Finding(
            "warning",
            "storage",
            f"the pool names {told or 'no store'} and the settings here "
            f"{config.storage.url}",
            "give all schedulers and the janitor the same storage.url",
        )
    from ..storage import Storage

    store = None
    try:
        most = config.storage.max_input_bytes
        store = await Storage.opened(url, max_bytes=most)
        await store.probe()
        used = await store.holds_inputs()
    except StorageUnavailable as error:
        cure = "mount the directory or correct the address, and its credentials in the "
        return Finding("error", "storage", str(error), f"{cure}environment")
    finally:
        if store is not None:
            store.close()
    if not used:
        return Finding(
            "info",
            "storage",
            f"{url}: writable from here and no input was ever stored in it; if some "
            "were, it is not mounted on this host, and jobs that name them wait",
        )
    return Finding("info", "storage", f"{url}: reachable and writable from here")
