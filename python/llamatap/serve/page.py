"""``GET /``: a page that draws the states of a text, and the headers that keep it to itself."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

__all__ = ["make_router"]


def _sources(page: str, tag: str) -> str:
    """The hashes of the page's own blocks of a tag, as a policy lists them."""
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def make_router(max_length: int) -> APIRouter:
    """The route of the page, which is read here once.

    :param max_length: the most tokens that the server takes.
    """
    page = files("llamatap.serve").joinpath("page.html").read_text("utf-8")
    # More rows than these are no picture any more.
    page = page.replace('<span id="most">128<', f'<span id="most">{min(128, max_length)}<')
    policy = {
        "default-src": "'none'",
        "script-src": _sources(page, "script"),
        "style-src": _sources(page, "style"),
        "connect-src": "'self'",
        # Its icon is empty, so that browsers ask for none.
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # Its script changes with the server, whose policy then holds another hash.
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def heat_map() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return router
