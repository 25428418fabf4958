"""Joins the dashboard to the application: pages, login, API, the sampling task."""

from fastapi import FastAPI

from . import admin_api, admin_jobs, pages, session_cookie
from .context import Gateway
from .live_views import LiveViews


def install(app: FastAPI, owner: Gateway) -> None:
    """Adds the dashboard.

    Args:
        app: The application.
        owner: Its gateway; it runs the sampling.
    """
    views = LiveViews(owner)
    owner.background(views.run)
    app.state.live_views = views
    for part in (session_cookie, admin_jobs, admin_api, pages):
        app.include_router(part.router)
