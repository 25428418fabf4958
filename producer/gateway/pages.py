"""The dashboard's files: the same page at every address, and what it loads.

Nothing is built and nothing comes from elsewhere. The policy sent along lets the
browser refuse whatever would: scripts and styles from other places, inline ones, and
text that is made into markup.
"""

import hashlib
import mimetypes
from pathlib import Path
from typing import Final
from urllib.parse import quote

from fastapi import APIRouter, Request, Response
from fastapi.responses import RedirectResponse

from .auth import identify
from .errors import ApiError

router: Final = APIRouter(include_in_schema=False)
_ROOT: Final = Path(__file__).parent / "static"
_PAGES: Final = frozenset({"", "jobs", "bulk", "dead", "playground"})
_KINDS: Final = {".js": "text/javascript", ".svg": "image/svg+xml"}
"""Not left to the host, whose tables differ."""
_POLICY: Final = (
    "default-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'; object-src 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS: Final = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Cache-Control": "no-cache",
}


class _File:
    """One file, read once: they are some hundred kilobytes together."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.tag = f'"{hashlib.sha256(self.body).hexdigest()[:20]}"'
        kind = _KINDS.get(path.suffix) or mimetypes.guess_type(path.name)[0]
        self.kind = f"{kind or 'application/octet-stream'}; charset=utf-8"


_FILES: Final = {
    path.relative_to(_ROOT).as_posix(): _File(path)
    for path in _ROOT.rglob("*")
    if path.is_file()
}


def _send(request: Request, name: str, status: int = 200) -> Response:
    """Answers with a file, or with nothing where the browser has it already."""
    file = _FILES[name]
    headers = {**_HEADERS, "ETag": file.tag}
    if status == 200 and request.headers.get("if-none-match") == file.tag:
        return Response(status_code=304, headers=headers)
    return Response(file.body, status, headers, media_type=file.kind)


@router.get("/")
async def root() -> Response:
    """Leads to the dashboard."""
    return RedirectResponse("/dashboard/", 307)


@router.get("/dashboard")
async def without_slash() -> Response:
    """Leads to the dashboard."""
    return RedirectResponse("/dashboard/", 307)


@router.get("/login")
async def login_page(request: Request) -> Response:
    """The form for an API key; the dashboard itself for someone who needs none."""
    if await _is_known(request):
        return RedirectResponse("/dashboard/", 303)
    return _send(request, "login.html")


@router.get("/dashboard/static/{name:path}")
async def asset(request: Request, name: str) -> Response:
    """A script, style or picture; they hold nothing of any pool."""
    if name not in _FILES:
        raise ApiError(404, f"the dashboard has no file '{name[:200]}'")
    return _send(request, name)


@router.get("/dashboard/{path:path}")
async def page(request: Request, path: str) -> Response:
    """The dashboard, at the address of any of its pages."""
    if not await _is_known(request):
        wanted = request.url.path
        if request.url.query:
            wanted += f"?{request.url.query}"
        return RedirectResponse(f"/login?next={quote(wanted, safe='/')}", 303)
    is_page = path.rstrip("/") in _PAGES or path.startswith("jobs/")
    return _send(request, "index.html", 200 if is_page else 404)


async def _is_known(request: Request) -> bool:
    """Whether the caller has a session, or needs none."""
    try:
        await identify(request)
    except ApiError as error:
        if error.status != 401:
            raise
        return False
    return True
