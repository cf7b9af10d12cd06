"""The server's page, used in a real Chromium; skipped where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.serving import serving, steps_held_after

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and ChromeDriver (Debian: chromium, chromium-driver)"
)


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.add_argument("--disable-background-networking")
    options.add_argument("--disable-component-update")
    options.add_argument(f"--user-data-dir={tmp_path / 'profile'}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(DRIVER))
    chrome.set_window_size(900, 700)
    yield chrome
    chrome.quit()


def test_files_are_asked_about(browser: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    def element(name: str) -> Any:
        return browser.find_element(By.ID, name)

    def answers() -> list[str]:
        found = browser.find_elements(By.CSS_SELECTOR, ".assistant")
        return [one.get_property("textContent") for one in found]

    def ask(question: str, number: int) -> str:
        element("question").send_keys(question)
        element("send").click()
        WebDriverWait(browser, 30).until(
            lambda _: (
                len(answers()) == number
                and element("send").is_enabled()
                and "tokens/s" in element("status").text
            )
        )
        return answers()[-1]

    book = "Call me Ishmael. " * 40
    (tmp_path / "book.html").write_text(
        f"<html><body><script>x()</script><p>{book.strip()}</p></body></html>"
    )
    with serving(layers=1) as served:
        browser.get(served.address)
        WebDriverWait(browser, 30).until(lambda _: element("model").text.startswith("tiny"))
        element("file").send_keys(str(tmp_path / "book.html"))
        WebDriverWait(browser, 30).until(lambda _: element("files").text.startswith("book.html"))
        first = ask("Who?", 1)
        asked = [{"role": "user", "content": f"{book.strip()}\n\nWho?"}]
        assert first == served.llm.chat(asked, max_tokens=32).text.lstrip()
        ask("And where?", 2)
        cached = int(element("status").text.split(" were there")[0].rsplit(", ", 1)[1].replace(",", ""))
        assert cached > len(book)  # the second question reads the book no more
        assert "of drafts accepted" in element("status").text
        browser.execute_script(
            "const send = fetch; window.sent = []; window.fetch = (path, options) =>"
            " { sent.push(JSON.parse(options.body).messages); return send(path, options); };"
        )
        with steps_held_after(monkeypatch, 1):
            element("question").send_keys("What is cut short?")
            element("send").click()
            WebDriverWait(browser, 30).until(lambda _: len(answers()) == 3 and answers()[-1])
            element("new").click()
            WebDriverWait(browser, 30).until(lambda _: element("send").is_displayed())
        ask("Who is new?", 1)
        old, new = browser.execute_script("return sent")
        assert (len(old), len(new)) == (5, 1)  # nothing of the old chat is in the new one
        (tmp_path / "odd.html").write_bytes(b"<p>caf\xe9")
        element("file").send_keys(str(tmp_path / "odd.html"))
        WebDriverWait(browser, 30).until(lambda _: "read as cp1252" in element("status").text)
        (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 torn")
        element("file").send_keys(str(tmp_path / "bad.pdf"))
        WebDriverWait(browser, 30).until(lambda _: "bad.pdf" in element("status").text)
        errors = [one["message"] for one in browser.get_log("browser") if "400" not in one["message"]]
        assert not [one for one in errors if "favicon" not in one]
