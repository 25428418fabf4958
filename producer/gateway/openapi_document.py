"""The OpenAPI document: how a caller is known, besides what the endpoints say."""

from typing import Any, Final

from fastapi import FastAPI

_OPEN: Final = ("/healthz", "/readyz")
"""Paths that ask for no key."""
_METHODS: Final = frozenset({"get", "put", "post", "delete", "patch"})


def document(app: FastAPI) -> None:
    """Completes what `GET /openapi.json` answers; it is made once.

    Args:
        app: The application, with all its routes.
    """
    make = app.openapi

    def completed() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(make())
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = completed  # type: ignore[method-assign]


def _complete(found: dict[str, Any]) -> None:
    components = found.setdefault("components", {})
    components["securitySchemes"] = {
        "key": {
            "type": "http",
            "scheme": "bearer",
            "description": "An API key, tm-…, as `tokenmill keys create` makes them.",
        }
    }
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            if method in _METHODS and path not in _OPEN:
                # {}: a gateway without keys that listens on its host alone asks none.
                operation.setdefault("security", [{"key": []}, {}])
