"""The server's page: its files and policy, and, where there is a Chromium, the page as a user has it."""

from __future__ import annotations

import base64
import json
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serving, steps_held_after

from offload_rt.server import page_files

ROOT = Path(__file__).parents[2]
CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
in_chromium = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="needs Chromium and ChromeDriver (Debian: chromium, chromium-driver)"
)
BOOK = ("Call me Ishmael. " * 40).strip()


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(layers=1) as served:
        yield served


# ------------------------------------------------------------------------------------- without a browser


def test_the_page_and_its_files_come_without_a_key_and_under_its_policy() -> None:
    with serving(layers=1, api_key="secret") as served:
        status, html, headers = served.call("/")
        assert status == 200 and headers["content-type"].startswith("text/html")
        named = re.findall(r'(?:src|href)="([^"]+)"', html)
        assert {Path(path).suffix for path in named} == {".css", ".js", ".svg"}
        files = {f"/page/{file.name}" for file in page_files.FOLDER.iterdir()}
        assert files > set(named)
        for path in ("/", *sorted(files)):
            status, text, headers = served.call(path)
            assert (status, bool(text)) == (200, True), path
            assert headers["content-security-policy"] == page_files.POLICY
            assert headers["x-content-type-options"] == "nosniff"
            assert served.call(path, **{"if-none-match": headers["etag"]})[0] == 304
        for path in ("/page/../app.py", "/page/%2e%2e/app.py", "/page/none.js", "/page/", "/page"):
            assert served.call(path)[0] in (401, 404), path
        assert served.call("/v1/models")[0] == 401


def test_the_policy_lets_nothing_in_from_elsewhere() -> None:
    rules = dict(rule.split(" ", 1) for rule in page_files.POLICY.split("; "))
    assert rules["default-src"] == "'none'"
    assert set(rules.values()) == {"'none'", "'self'"}
    html = (page_files.FOLDER / "page.html").read_text("utf-8")
    assert not re.search(r"<style|<script(?![^>]* src=)|\sstyle=|\son\w+=|https?:", html)


def test_the_page_is_packaged_with_the_license_of_what_it_uses() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    patterns = project["tool"]["setuptools"]["package-data"]["offload_rt.server"]
    packaged = {file for pattern in patterns for file in page_files.FOLDER.parent.glob(pattern)}
    assert packaged >= set(page_files.FOLDER.iterdir())
    license_file = page_files.FOLDER / "markdown-it.LICENSE"
    assert str(license_file.relative_to(ROOT)) in project["project"]["license-files"]
    version = re.match(
        r"/\*! markdown-it (\S+) ", (page_files.FOLDER / "markdown-it.min.js").read_text("utf-8")
    )
    assert version is not None and f"markdown-it {version[1]} " in license_file.read_text("utf-8")


def document(served: Served, name: str, data: bytes, encoding: object) -> tuple[int, Any]:
    body = {"name": name, "data": base64.b64encode(data).decode(), "encoding": encoding}
    status, text, _ = served.call("/document", body)
    return status, json.loads(text)


def test_a_document_is_read_in_the_encoding_that_is_named(served: Served) -> None:
    assert document(served, "a.txt", b"caf\xe9", "cp1252") == (200, {"text": "café", "notices": []})
    assert document(served, "a.txt", "Кит".encode("koi8-r"), "KOI8-R")[1]["text"] == "Кит"
    assert document(served, "a.html", "<p>Кит".encode("cp1251"), "cp1251")[1]["text"] == "Кит"
    assert document(served, "a.txt", "café".encode(), None)[1]["text"] == "café"
    status, answer = document(served, "a.txt", b"caf\xe9", "utf-8")
    assert (status, "byte 3 is 0xe9" in answer["error"]["message"]) == (400, True)


@pytest.mark.parametrize("name", ["a.txt", "a.pdf"])
@pytest.mark.parametrize(
    "encoding", ["klingon", "hex", "punycode", "idna", "undefined", "", "a\0b", "\ud800", 7, "a" * 65]
)
def test_an_unknown_encoding_is_refused_by_name(served: Served, name: str, encoding: object) -> None:
    status, answer = document(served, name, b"Whale", encoding)
    assert (status, answer["error"]["param"]) == (400, "encoding"), answer
    if isinstance(encoding, str) and len(encoding) <= 64 and encoding.isascii():
        assert f"encoding {encoding!r} is unknown; name one" in answer["error"]["message"]


# --------------------------------------------------------------------------------------------- in Chromium


@pytest.fixture(scope="module")
def chrome(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    options = ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for flag in ("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-sync"):
        options.add_argument(f"--{flag}")
    options.add_argument("--disable-background-networking")
    options.add_argument("--disable-component-update")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    chrome = Chrome(options=options, service=Service(DRIVER))
    chrome.set_window_size(900, 700)
    yield chrome
    chrome.quit()


class Page:
    """The page in a browser.

    Requests are recorded, and one for a chat completion is answered with `events`, if there are any.
    """

    FETCH = """
        const send = window.fetch;
        window.sent = [];
        window.events = [];
        window.push = text => window.stream.enqueue(new TextEncoder().encode(text));
        window.fetch = (path, options) => {
          if (!path.endsWith("/completions")) return send(path, options);
          window.sent.push(JSON.parse(options.body));
          if (!window.scripted) return send(path, options);
          const body = new ReadableStream({start(controller) {
            window.stream = controller;
            options.signal.addEventListener("abort", () => controller.error(options.signal.reason));
          }});
          return Promise.resolve(new Response(body));
        };
    """

    def __init__(self, chrome: Any, address: str) -> None:
        self.chrome = chrome
        chrome.get(address)
        self.wait(lambda: self.text("#model").startswith("tiny"))
        chrome.execute_script(self.FETCH)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.chrome.execute_script(script, *arguments)

    def all(self, selector: str) -> list[Any]:
        from selenium.webdriver.common.by import By

        return list(self.chrome.find_elements(By.CSS_SELECTOR, selector))

    def text(self, selector: str) -> str:
        return "\n".join(element.text for element in self.all(selector))

    def wait(self, reached: Callable[[], object]) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.chrome, 30, poll_frequency=0.05).until(lambda _: reached())

    def type(self, selector: str, text: str) -> None:
        self.all(selector)[0].send_keys(text)

    def shows(self, selector: str, text: str) -> bool:
        return text in self.text(selector)

    def click(self, selector: str) -> None:
        self.all(selector)[0].click()

    def open(self, *paths: Path) -> None:
        self.type("#file", "\n".join(map(str, paths)))

    def begin(self, question: str) -> None:
        self.type("#question", question)
        self.click("#send")

    def ask(self, question: str) -> None:
        """Asks a question and waits for the answer of the server."""
        answered = len(self.all(".turn .stats"))
        self.begin(question)
        self.wait(lambda: len(self.all(".turn .stats")) == answered + 1)

    @property
    def sent(self) -> list[list[dict[str, str]]]:
        """The messages of each request so far."""
        return [request["messages"] for request in self.run("return sent")]

    def script(self) -> None:
        """Answers of chats come from `push` from now on."""
        self.run("window.scripted = true")

    def push(self, *events: dict[str, Any]) -> None:
        """Sends events of an answer to the page."""
        self.run("push(arguments[0])", "".join(f"data: {json.dumps(event)}\n\n" for event in events))

    def say(self, **delta: str) -> None:
        self.push({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def end(self, reason: str | None = "stop") -> None:
        if reason is not None:
            self.push({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        self.run("stream.close()")
        self.wait(lambda: self.all("#send")[0].is_displayed())


@pytest.fixture
def page(chrome: Any, served: Served) -> Iterator[Page]:
    chrome.get_log("browser")
    page = Page(chrome, served.address)
    page.run("localStorage.clear()")
    yield page
    refusals = re.compile(r"the server responded with a status of 4\d\d")
    faults = [line["message"] for line in chrome.get_log("browser") if line["level"] == "SEVERE"]
    assert not [fault for fault in faults if not refusals.search(fault)]  # of scripts and of the policy


@in_chromium
def test_a_conversation_about_files(
    page: Page, served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = tmp_path / "book.html"
    book.write_text(f"<html><body><script>x()</script><p>{BOOK}</p></body></html>")
    (tmp_path / "sequel.txt").write_text("The whale.")
    page.open(book)
    page.wait(lambda: f"{len(BOOK)} characters" in page.text("#files"))
    page.ask("Who?")
    asked = [{"role": "user", "content": f"{BOOK}\n\nWho?"}]
    answer = served.llm.chat(asked, max_tokens=32).text.lstrip()
    assert page.text("#files") == "" and "book.html" in page.text(".question")
    page.ask("And where?")
    assert page.sent[1][:2] == [*asked, {"role": "assistant", "content": answer}]
    stats = page.text(".turn:last-child .stats")
    cached = re.search(r"([\d,]+) cached", stats)
    assert cached and int(cached[1].replace(",", "")) > len(BOOK)  # the book is not read again
    assert "% of drafts accepted" in stats

    # A file that is opened now may join the conversation, which goes on.
    page.type("#question", "half a question")
    page.open(tmp_path / "sequel.txt")
    page.wait(lambda: page.all("#adding")[0].is_displayed())
    page.click("#adding [value=cancel]")
    assert page.text("#files") == "" and len(page.all(".turn")) == 2
    page.open(tmp_path / "sequel.txt")
    page.click("#adding [value=add]")
    page.wait(lambda: "10 characters" in page.text("#files"))
    page.ask(" about both")
    joined = "# sequel.txt\n\nThe whale.\n\nhalf a question about both"
    assert page.sent[2][0] == asked[0]
    assert page.sent[2][4]["content"] == joined

    # New chat: an answer under way is stopped, nothing of it comes along, and its documents are there again.
    with steps_held_after(monkeypatch, 1):
        page.begin("What is cut short?")
        page.wait(lambda: page.text(".turn:last-child .answer"))
        page.click("#new")
        page.wait(lambda: page.all("#send")[0].is_displayed())
    served.idle()
    assert "book.html" in page.text("#files") and "sequel.txt" in page.text("#files")
    page.ask("Who is new?")
    assert [one["content"] for one in page.sent[-1]] == [
        f"# book.html\n\n{BOOK}\n\n# sequel.txt\n\nThe whale.\n\nWho is new?"
    ]

    # Or a new conversation begins with the file.
    page.open(tmp_path / "sequel.txt")
    page.click("#adding [value=anew]")
    page.wait(lambda: "10 characters" in page.text("#files"))
    assert not page.all(".turn")
    page.ask("What?")
    assert [one["content"] for one in page.sent[-1]] == ["The whale.\n\nWhat?"]


@in_chromium
def test_what_cannot_be_read_is_red_and_has_a_choice_of_encoding(page: Page, tmp_path: Path) -> None:
    (tmp_path / "odd.txt").write_bytes("Ишмаэль".encode("cp1251"))
    (tmp_path / "bad.pdf").write_bytes(b"%PDF-1.4 torn")
    (tmp_path / "page.html").write_bytes(b"<p>caf\xe9")
    page.open(tmp_path / "odd.txt", tmp_path / "bad.pdf", tmp_path / "page.html")
    page.wait(lambda: len(page.all("#files .failed")) == 2 and "read as cp1252" in page.text("#files"))
    colours = page.run(
        "return [...document.querySelectorAll('#files .error')].map(e => getComputedStyle(e).color)"
    )
    assert colours[:2] == ["rgb(179, 38, 30)"] * 2
    assert "not UTF-8 (byte 0 is 0xc8)" in page.text("#files .failed")
    assert len(page.all("#files input")) == 2  # a PDF has no encoding
    page.begin("Who?")
    assert "odd.txt could not be read: choose its encoding" in page.text("#problem")
    assert page.all("#question")[0].get_property("value") == "Who?" and not page.sent
    page.type("#files input", "klingon\n")
    page.wait(lambda: "encoding 'klingon' is unknown" in page.text("#files .failed"))
    page.all("#files input")[0].clear()
    page.type("#files input", "cp1251\n")
    page.wait(lambda: "7 characters" in page.text("#files"))
    page.click("[aria-label='Remove bad.pdf']")
    page.click("[aria-label='Remove page.html']")
    page.script()
    page.click("#send")
    page.wait(lambda: page.sent)
    assert page.sent[0][0]["content"] == "Ишмаэль\n\nWho?"


@in_chromium
def test_answers_are_markdown_and_nothing_else(page: Page) -> None:
    markdown = (
        "# Whales\n\nText with **bold** and `code`.\n\n- one\n- two\n\n```python\nprint('<b>')\n```\n\n"
        "| a | b |\n|---|--:|\n| 1 | 2 |\n\n[safe](https://example.org) [mail](mailto:a@example.org) "
        "[bad](javascript:alert(1)) [file](file:///etc/passwd) [here](/metrics) [later]\n\n"
        "<script>window.hit = 1</script><img src=x onerror='window.hit = 1'>\n\n"
        "![picture](https://example.org/a.png) ![inline](data:image/png;base64,AAAA)\n\n"
        "[later]: https://example.org/later\n"
    )
    page.script()
    page.begin("Tell me")
    page.wait(lambda: page.sent)
    page.say(reasoning_content="I <i>think</i>")
    page.wait(lambda: page.text(".thoughts div") == "I <i>think</i>")
    for start in range(0, len(markdown), 7):
        page.say(content=markdown[start : start + 7])
        if start % 70 == 0:  # let it render what there is
            page.run("return new Promise(requestAnimationFrame)")
    page.end()
    assert page.text(".thoughts") == "Thoughts"  # folded
    assert page.text(".answer h3") == "Whales" and len(page.all(".answer li")) == 2
    assert page.text(".answer pre code").strip() == "print('<b>')"
    assert page.text(".answer td.align-right") == "2"
    links = {one.text: one for one in page.all(".answer a")}
    assert sorted(links) == ["later", "mail", "safe"]
    assert {one.get_attribute("rel") for one in links.values()} == {"noopener noreferrer"}
    assert {one.get_attribute("target") for one in links.values()} == {"_blank"}
    assert not page.all(".answer img, .answer script, .answer [style], .answer b")
    assert page.run("return window.hit") is None
    assert "<script>window.hit = 1</script>" in page.text(".answer")
    for clipboard in (
        "navigator.clipboard.writeText = async text => { taken = text; }",
        "navigator.clipboard.writeText = async () => { throw new Error(); };"
        "document.execCommand = () => { taken = document.activeElement.value; return true; }",
    ):
        page.run(f"window.taken = null; {clipboard}")
        page.click(".turn > .row .copy")
        page.wait(lambda: page.run("return taken") == markdown)
    page.run("navigator.clipboard.writeText = async text => { taken = text; }")
    page.click(".code .copy")
    page.wait(lambda: page.run("return taken") == "print('<b>')\n")


@in_chromium
def test_markdown_that_streams_ends_as_if_it_had_come_at_once(page: Page) -> None:
    blocks = [
        *("para\n", "para\n# head\n", "- a\n\n  b\n- c\n", "> quote\nlazy\n", "    code\n"),
        *("~~~\n# no\n~~~\n", "a | b\n-|-\n1 | 2\n", "title\n---\n", "1. x\n2. y\n", "\n", "***\n"),
        *("[r]: https://example.org\n", "see [r]\n", "win\r\nend\r\n", "tail *open"),
    ]
    different = page.chrome.execute_async_script(
        """
        const [blocks, done] = arguments;
        import("/page/markdown.js").then(async ({MarkdownView}) => {
          let seed = 1;
          const random = limit => (seed = seed * 48271 % 2147483647) % limit;
          const shown = () => {
            const element = document.createElement("div");
            return {element, view: new MarkdownView(element)};
          };
          const html = ({element}) =>
            element.innerHTML.replace(/<div class="tail">([^]*)<\\/div>$/, "$1").trim();
          const different = [];
          window.requestAnimationFrame = render => render();
          for (let round = 0; round < 60; round += 1) {
            let text = "";
            for (let block = 0; block < 8; block += 1) {
              text += blocks[random(blocks.length)] + (random(2) ? "\\n" : "");
            }
            const whole = shown(), pieces = shown();
            whole.view.append(text);
            whole.view.finish();
            for (let at = 0; at < text.length;) {
              const size = 1 + random(9);
              pieces.view.append(text.slice(at, at += size));
              await new Promise(rendered => setTimeout(rendered));
            }
            pieces.view.finish();
            if (html(whole) !== html(pieces)) different.push([text, html(whole), html(pieces)]);
          }
          done(different);
        }).catch(error => done([String(error)]));
        """,
        blocks,
    )
    assert different == []


@in_chromium
def test_progress_of_a_request_is_told_in_words(page: Page) -> None:
    page.script()
    page.begin("Who?")
    page.wait(lambda: page.sent)
    for position, words in ((2, "2 requests before you"), (1, "1 request before you"), (0, "you are next")):
        page.push({"choices": [], "queue": {"position": position}})
        page.wait(partial(page.shows, "#status", words))
        assert words in page.all("#announcer")[0].get_property("textContent")
    # Each token costs as much as there are tokens before it: time = (processed / 1000)².
    for thousands in range(0, 61, 10):
        progress = {"total": 120_000, "cache": 0, "processed": thousands * 1000}
        page.push({"choices": [], "prompt_progress": progress | {"time_ms": thousands**2 * 10}})
    page.wait(lambda: "60,000 of 120,000 tokens, about 2 min left" in page.text("#status"))  # 144 s − 36 s
    assert page.all("#progress")[0].is_displayed()
    for _ in range(12):
        page.say(content="whale ")
        page.run("return new Promise(done => setTimeout(done, 120))")
    page.wait(lambda: re.search(r"Answering: 12 tokens, [\d.]+ tokens/s", page.text("#status")))
    assert not page.all("#progress")[0].is_displayed()
    page.end("length")
    assert "Cut off at the limit of tokens" in page.text(".stats")


@in_chromium
def test_the_place_in_the_queue_is_shown_until_the_turn_comes(
    chrome: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(layers=1, parallel=1) as served:
        with steps_held_after(monkeypatch, 1), served.client() as client:
            client.completions.create(model="tiny", prompt="Call me", stream=True)
            served.wait_until(lambda: served.worker.running == 1)
            page = Page(chrome, served.address)
            page.begin("Who?")
            page.wait(lambda: page.shows("#status", "Waiting: you are next."))
        page.wait(lambda: page.shows(".turn .stats", "tokens/s"))
    assert not page.shows("#status", "Waiting")


@in_chromium
def test_what_came_before_an_end_stays_and_what_did_not_is_typed_again(page: Page, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("Call me Ishmael.")

    def question() -> object:
        return page.all("#question")[0].get_property("value")

    page.script()
    page.open(tmp_path / "book.txt")
    page.wait(lambda: "16 characters" in page.text("#files"))
    page.begin("Who?")
    page.wait(lambda: len(page.sent) == 1)
    page.type("#question", "typed meanwhile")
    page.click("#stop")
    page.wait(lambda: page.all("#send")[0].is_displayed())
    assert (
        question() == "Who?\ntyped meanwhile" and not page.all(".turn") and "book.txt" in page.text("#files")
    )
    page.click("#send")
    page.wait(lambda: len(page.sent) == 2)
    page.push({"error": {"message": "too many requests are waiting: try again later"}})
    page.wait(lambda: "too many requests are waiting" in page.text("#problem"))
    assert question() == "Who?\ntyped meanwhile" and "book.txt" in page.text("#files")
    page.click("#send")
    page.wait(lambda: len(page.sent) == 3)
    page.click("#new")  # while it waits
    page.wait(lambda: page.all("#send")[0].is_displayed())
    assert question() == "" and page.text("#files").count("book.txt") == 1
    page.begin("Who?")
    page.wait(lambda: len(page.sent) == 4)
    page.say(content="Ishm")
    page.wait(lambda: page.text(".answer") == "Ishm")
    page.click("#stop")
    page.wait(lambda: "Stopped." in page.text(".stats"))
    page.begin("Go on")
    page.wait(lambda: len(page.sent) == 5)
    assert [one["content"] for one in page.sent[4]][1:] == ["Ishm", "Go on"]
    page.say(content="ael")
    page.end(None)  # without a finish reason: the connection broke
    assert "connection to the server was lost" in page.text("#problem") and "Broken off." in page.text(
        ".stats"
    )


@in_chromium
def test_the_system_prompt_is_sent_and_kept(page: Page, served: Served) -> None:
    page.click("#settings summary")
    page.type("#system", "Answer briefly.")
    page.type("#question", "Who?\ue008\ue007\ue000And where?")  # Shift+Enter is a new line
    page.type("#question", "\ue007")
    page.wait(lambda: page.sent)
    assert page.sent[0] == [
        {"role": "system", "content": "Answer briefly."},
        {"role": "user", "content": "Who?\nAnd where?"},
    ]
    page.chrome.get(served.address)
    page.wait(lambda: page.text("#system-set") == "(set)")
    assert page.all("#system")[0].get_property("value") == "Answer briefly."


@in_chromium
def test_a_key_is_asked_for_where_the_server_has_one(chrome: Any) -> None:
    with serving(layers=1, api_key="schlüssel") as served:
        chrome.get(served.address)
        page = Page.__new__(Page)
        page.chrome = chrome
        page.wait(lambda: "API key is missing or wrong" in page.text("#problem"))
        page.type("#key", "schlüssel\n")
        page.wait(lambda: page.text("#model").startswith("tiny"))
        assert page.text("#problem") == ""
    page.begin("Who?")
    page.wait(lambda: "does not answer" in page.text("#problem"))
    assert page.all("#question")[0].get_property("value") == "Who?"


@in_chromium
def test_narrow_and_dark_pages_fit(page: Page) -> None:
    page.script()
    page.begin("Wide?")
    page.wait(lambda: page.sent)
    page.say(
        content="| a | b |\n|---|---|\n| "
        + "x" * 300
        + " | y |\n\n```\n"
        + "z" * 300
        + "\n```\n\n"
        + "w" * 300
    )
    page.end()
    try:
        for scheme in ("light", "dark"):
            page.chrome.execute_cdp_cmd(
                "Emulation.setEmulatedMedia",
                {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
            )
            page.chrome.execute_cdp_cmd(
                "Emulation.setDeviceMetricsOverride",
                {"width": 400, "height": 700, "deviceScaleFactor": 1, "mobile": False},
            )
            assert page.run("return document.documentElement.scrollWidth <= innerWidth")
            background = page.run("return getComputedStyle(document.body).backgroundColor")
            assert (background == "rgb(255, 255, 255)") == (scheme == "light")
            names = page.run(
                "return [...document.querySelectorAll('button, input, textarea, progress')]"
                ".filter(e => !(e.ariaLabel || e.labels?.length || e.textContent.trim()))"
                ".map(e => e.outerHTML)"
            )
            assert names == []
    finally:
        page.chrome.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
