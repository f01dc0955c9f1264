"""Chromium, without a network, and pages that must not complain or ask for anything."""

import shutil
from contextlib import contextmanager

import pytest
from playwright.sync_api import sync_playwright

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-sync", "--disable-background-networking", "--disable-component-update"),
]


@pytest.fixture(scope="session")
def chromium():
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium):
    """Opens a page of a file, offline; fails for errors in it and for requests that leave it."""

    @contextmanager
    def open_page(path, *, fragment="", script=True, embedded=False, **options):
        context = chromium.new_context(offline=True, java_script_enabled=script, **options)
        page = context.new_page()
        complaints = []
        page.on("console", lambda m: m.type == "error" and complaints.append(m.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on(
            "request",
            lambda r: (
                r.url.split(":")[0] not in ("file", "data", "blob") and complaints.append(r.url)
            ),
        )
        page.goto(path.as_uri() + fragment)
        if embedded:
            page.frame_locator("iframe").locator("#explorer").wait_for()
        elif script:
            page.wait_for_selector("#explorer:not([hidden])")
            page.wait_for_function("() => explorer.frames.length > 0")
        yield page
        context.close()
        assert not complaints

    return open_page
