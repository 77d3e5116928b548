"""Debian's Chromium, driven by Playwright, for whoever looks at pages: tests, and scripts that take screenshots."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def chromium_program() -> str | None:
    """The path of ``chromium``; None where it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(slots=True)
class Seen:
    """What a page asked for and complained of since it was opened."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def browser_page(
    *, width: int = 1200, height: int = 900, cookies: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[tuple[Any, Seen]]:
    """A Playwright page in a headless Chromium, and what it saw. ``cookies``: name → (url, value).

    Raises:
        FileNotFoundError: there is no Chromium.
    """
    from playwright.sync_api import sync_playwright

    program = chromium_program()
    if program is None:
        raise FileNotFoundError("expected chromium on PATH; apt-get install chromium")
    with sync_playwright() as playwright:
        # Without a sandbox, as containers run as root; only pages of our own making are opened.
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        try:
            context = browser.new_context(viewport={"width": width, "height": height})
            context.add_cookies([{"name": n, "url": u, "value": v} for n, (u, v) in (cookies or {}).items()])
            page = context.new_page()
            seen = Seen()
            page.on("request", lambda request: seen.requests.append(request.url))
            page.on("console", lambda m: seen.errors.append(m.text) if m.type == "error" else None)
            page.on("pageerror", lambda error: seen.errors.append(str(error)))
            yield page, seen
        finally:
            browser.close()
