"""``GET /``: a page that draws the states of a text as a heat map, under a strict content security policy."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from fastapi import APIRouter
from fastapi.responses import HTMLResponse

__all__ = ["make_router"]


def _sources(page: str, tag: str) -> str:
    """Hashes of the page's own ``<script>`` or ``<style>`` blocks, as a content security policy lists
    them."""
    blocks = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() for block in blocks]
    return " ".join(f"'sha256-{digest}'" for digest in digests)


def make_router(max_length: int) -> APIRouter:
    """The route of the page. The file is read once, here.

    :param max_length: maximum number of tokens in a prompt.
    """
    page = files("llamatap.serve").joinpath("page.html").read_text("utf-8")
    # More than 128 rows are too small to see.
    page = page.replace('<span id="most">128<', f'<span id="most">{min(128, max_length)}<')
    policy = {
        "default-src": "'none'",
        "script-src": _sources(page, "script"),
        "style-src": _sources(page, "style"),
        "connect-src": "'self'",
        # The page has an empty icon, so that browsers do not ask for one.
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        # The policy of this version refuses the script of a cached page of another version.
        "Cache-Control": "no-cache",
    }
    router = APIRouter()

    @router.head("/", include_in_schema=False)
    @router.get("/", include_in_schema=False)
    async def heat_map() -> HTMLResponse:
        return HTMLResponse(page, headers=headers)

    return router
