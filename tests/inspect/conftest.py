"""Pages in Chromium, without a network, that must not complain or ask for anything."""

from contextlib import contextmanager

import pytest


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
