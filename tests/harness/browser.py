"""Debian's Chromium, driven by Playwright: for tests of pages and for scripts that take screenshots."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any


def chromium_program() -> str | None:
    """The path of ``chromium``, None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


@dataclass(slots=True)
class Seen:
    """A page's requests and errors since it was opened."""

    requests: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


@contextmanager
def browser_page(
    *, width: int = 1200, height: int = 900, cookies: Mapping[str, tuple[str, str]] | None = None
) -> Iterator[tuple[Any, Seen]]:
    """A Playwright page in a headless Chromium, with its requests and errors. ``cookies``: name → (url, value).

    Raises:
        FileNotFoundError: Chromium is not installed.
    """
    from playwright.sync_api import sync_playwright

    program = chromium_program()
    if program is None:
        raise FileNotFoundError("expected chromium on PATH, got none. Run apt-get install chromium.")
    with sync_playwright() as playwright:
        # Containers run as root, where Chromium's sandbox fails. Tests open this project's pages only.
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
