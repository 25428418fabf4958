"""Where a browser's request comes from, and through what it came.

A browser attaches cookies, and reaches this host, for pages of anyone. What protects
here is what pages cannot forge: `Origin`, `Sec-Fetch-Site` and `Host`.
"""

import ipaddress
from collections.abc import Collection
from typing import Final
from urllib.parse import urlsplit

from fastapi import Request

from .errors import ApiError

SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
_OUR_OWN: Final = frozenset({"same-origin", "none"})
"""`Sec-Fetch-Site` of our own pages, and of an address that was typed."""
_LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_FORWARDED: Final = frozenset({"forwarded", "via"})


def refuse_foreign_pages(request: Request, allowed: Collection[str] = ()) -> None:
    """Refuses what a page of another site asks for.

    Args:
        request: One that no key vouches for.
        allowed: Origins whose pages may ask, too.

    Raises:
        ApiError: 403, the browser says that it comes from elsewhere.
    """
    origin = request.headers.get("origin")
    if origin in allowed:
        return
    host = request.headers.get("host", "")
    is_foreign = origin is not None and urlsplit(origin).netloc != host
    # A link from elsewhere may lead here; nothing else of a foreign page may.
    is_link = (
        request.method in SAFE_METHODS
        and request.headers.get("sec-fetch-mode") == "navigate"
    )
    site = request.headers.get("sec-fetch-site", "none")
    if is_foreign or (site not in _OUR_OWN and not is_link):
        raise ApiError(
            403,
            f"pages of {(origin or 'other sites')[:200]} may not call this gateway; "
            "name them in gateway.cors_origins, or use an API key",
            code="origin_refused",
        )


def came_by_https(request: Request) -> bool:
    """Whether the page that asks came by https, ended here or at a proxy.

    Args:
        request: One whose origin was found to be ours.
    """
    origin = request.headers.get("origin", "")
    return request.url.scheme == "https" or urlsplit(origin).scheme == "https"


def names_loopback(host: str) -> bool:
    """Whether an address or a name is that of this host alone."""
    if host in _LOOPBACK_NAMES:
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_foreign_names(request: Request) -> None:
    """Refuses a page whose name was made to point at this host.

    Raises:
        ApiError: 403, the name is none of this host's.
    """
    host = request.headers.get("host", "")
    name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
    if not names_loopback(name.strip("[]")):
        raise ApiError(
            403,
            f"without API keys this gateway answers to the names of this host alone, "
            f"not to '{host[:200]}'; make a key with: tokenmill keys create",
            code="host_refused",
        )


def refuse_proxies(request: Request) -> None:
    """Refuses what a proxy passes on: who asks may then be anywhere.

    Raises:
        ApiError: 403, it came through one.
    """
    for name in request.headers:
        if name in _FORWARDED or name.startswith("x-forwarded-"):
            raise ApiError(
                403,
                f"the header {name} says that a proxy passes this on, so it may come "
                "from another host, and there is no API key yet; make one with: "
                "tokenmill keys create (or let everyone in with gateway.auth = 'none')",
                code="proxy_refused",
            )
