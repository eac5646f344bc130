"""The page at `/` in a real browser: it streams, shows the engine, asks for keys, and can be used without a mouse."""

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from jhybrid.tokenizer import ByteTokenizer
from jhybrid_server import page_files
from jhybrid_server.keys import Keys
from tests.server.fake_engine import FakeEngine, answer_text
from tests.server.http_client import ask, events
from tests.server.serving import Served, eventually, serving

CHROMIUM = shutil.which("chromium")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync"
)
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m.content }}|{% endfor %}"
ENDLESS = {"prompt": "abc", "max_tokens": 1900}
Open = Callable[..., Page]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None:
        text = "there is no chromium: install it (Debian: apt-get install chromium) to test the page"
        pytest.fail(text) if os.environ.get("CI") else pytest.skip(text)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS.split())
        yield browser
        browser.close()


@pytest.fixture
def engine() -> FakeEngine:
    engine = FakeEngine(step_seconds=0.002)
    engine.tokenizer = ByteTokenizer(263, chat_template=TEMPLATE)
    return engine


@pytest.fixture
def served(engine: FakeEngine) -> Iterator[Served]:
    with serving(lambda: engine) as served:
        yield served


@pytest.fixture
def show(browser: Browser) -> Iterator[Open]:
    """Opens the page of a server. Afterwards: nothing was asked of anybody else, and nothing went wrong in it."""
    contexts, asked, complaints = [], [], []

    def show(served: Served, width: int = 1280, scheme: str = "light") -> Page:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)  # pyright: ignore[reportArgumentType]
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on("request", lambda request: asked.append((served.url, request.url)))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
        page.goto(served.url + "/")
        return page

    yield show
    for context in contexts:
        assert context.cookies() == []
        context.close()
    assert [url for server, url in asked if not url.startswith(server + "/")] == []
    # A test's server may end before its page does.
    harmless = "status of (401|503)|ERR_CONNECTION_REFUSED"
    assert [text for text in complaints if not re.search(harmless, text)] == []


def ready(page: Page) -> None:
    expect(page.locator("#state")).to_have_text("Ready")


def test_chat_streams_and_remembers(served: Served, engine: FakeEngine, show: Open):
    page = show(served)
    ready(page)
    page.locator("summary").click()
    page.get_by_label("Most tokens").fill("600")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("System message").fill("Be brief")
    page.get_by_label("Prompt", exact=True).fill("hello")
    page.get_by_role("button", name="Send").click()
    first = page.locator(".turn.assistant .text").first
    expect(first).not_to_be_empty()
    assert len(first.inner_text()) < 600, "the whole answer came at once"
    expect(page.locator(".turn.assistant .cost")).to_contain_text("600 tokens")
    prompt = len(engine.submitted[-1].prompt_token_ids or [])
    assert first.inner_text() == answer_text(prompt, 600)
    assert (engine.submitted[-1].sampling.seed, engine.submitted[-1].sampling.temperature) == (7, 0.7)
    assert answer_text(prompt, 600) in page.locator("#announcer").inner_text()
    page.get_by_label("Prompt", exact=True).fill("<b>again</b>")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .cost").nth(1)).to_contain_text("tokens")
    sent = bytes(t for t in engine.submitted[-1].prompt_token_ids or [] if t < 256).decode()
    assert sent == f"system:Be brief|user:hello|assistant:{answer_text(prompt, 600)}|user:<b>again</b>|"
    assert page.locator(".turn.user").nth(1).inner_text() == "<b>again</b>"
    page.get_by_role("button", name="Clear").click()
    expect(page.locator(".turn")).to_have_count(0)


def test_text_goes_on_where_there_is_no_chat_template(show: Open):
    engine = FakeEngine(step_seconds=0.002)
    with serving(lambda: engine) as served:
        page = show(served)
        ready(page)
        expect(page.get_by_label("Chat", exact=True)).to_be_disabled()
        page.get_by_label("Prompt", exact=True).fill("abc")
        page.keyboard.press("Enter")
        expect(page.locator(".turn .cost")).to_contain_text("200 tokens")
        assert page.locator(".turn .text").inner_text() == answer_text(4, 200)
        page.get_by_label("Prompt", exact=True).fill("nan")
        page.keyboard.press("Enter")
        expect(page.locator(".turn .cost").nth(1)).to_contain_text("Failed: the model's logits at position 5 are NaN")


def test_picture_of_the_engine(served: Served, engine: FakeEngine, show: Open):
    page = show(served)
    ready(page)
    expect(page.locator("#sequences-caption")).to_have_text("No sequence is running")
    engine.step_seconds = 0.02
    streams = [events(served.http.port, "/v1/completions", ENDLESS) for _ in range(3)]
    for stream in streams:
        next(stream)
    expect(page.locator("#sequences tr")).to_have_count(3)
    expect(page.locator("#running")).to_have_text("3 of 4")
    slots = page.get_by_role("img", name="Slots: 3 of 4 in use")
    expect(slots).to_be_visible()
    expect(page.get_by_role("img", name="Pages: 3 of 100 in use")).to_be_visible()
    expect(page.get_by_role("img", name=re.compile("^time per token, now [0-9.]+ ms"))).to_be_visible()
    chips = page.locator("#sequences .cell").evaluate_all(
        "chips => chips.map(c => getComputedStyle(c).backgroundColor)"
    )
    drawn = slots.evaluate(
        """canvas => [0, 1, 2, 3].map(i => {
            const [red, green, blue] = canvas.getContext('2d').getImageData(i * 20 + 9, 9, 1, 1).data;
            return `rgb(${red}, ${green}, ${blue})`;
        })"""
    )
    assert len(set(chips)) == 3 and drawn[:3] == chips and drawn[3] not in chips
    slots.hover(position={"x": 70, "y": 9})
    expect(page.locator("#pool-slots .pointed")).to_have_text("3: free")
    for stream in streams:
        stream.close()  # pyright: ignore[reportAttributeAccessIssue]
    expect(page.locator("#sequences tr")).to_have_count(0)


def test_key_is_asked_for_and_kept_nowhere(engine: FakeEngine, show: Open):
    with serving(lambda: engine, keys=Keys(["right"])) as served:
        page = show(served)
        key = page.get_by_label("This server asks for an API key")
        expect(key).to_be_focused()
        key.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_have_text("That key is not known here.")
        key.fill("right")
        page.keyboard.press("Enter")
        ready(page)
        expect(key).to_be_hidden()
        page.get_by_label("Prompt", exact=True).fill("abc")
        page.keyboard.press("Enter")
        expect(page.locator(".turn .cost")).to_contain_text("tokens")
        stored = page.evaluate("() => [localStorage.length, sessionStorage.length, document.body.innerHTML]")
        assert stored[:2] == [0, 0] and "right" not in stored[2] and key.input_value() == ""
        page.reload()
        expect(key).to_be_focused()


def test_keyboard_alone(served: Served, engine: FakeEngine, show: Open):
    page = show(served)
    ready(page)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the prompt")).to_be_focused()
    page.keyboard.press("Enter")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    engine.step_seconds = 0.05
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator(".turn.assistant .text")).not_to_be_empty()
    page.keyboard.press("Escape")
    expect(page.locator(".turn .cost")).to_have_text("Stopped.")
    eventually(lambda: len(engine.aborted) == 1)
    assert page.locator(".turn.user").inner_text() == "one\ntwo"
    expect(page.get_by_label("Prompt", exact=True)).to_be_focused()


def test_everything_has_a_name(served: Served, show: Open):
    page = show(served)
    ready(page)
    expect(page.get_by_role("img", name="Slots: 0 of 4 in use")).to_be_visible()
    page.locator("summary").click()
    for role in ("button", "textbox", "spinbutton", "radio", "link", "img", "region", "log", "table"):
        found = page.get_by_role(role)  # pyright: ignore[reportArgumentType]
        named = page.get_by_role(role, name=re.compile("."))  # pyright: ignore[reportArgumentType]
        assert found.count() == named.count() > 0, role
    assert page.locator("h1").count() == 1 and page.locator("html").get_attribute("lang") == "en"


def test_a_start_is_followed(engine: FakeEngine, show: Open):
    loaded = threading.Event()

    def slow_start() -> FakeEngine:
        loaded.wait(20)
        return engine

    with serving(slow_start, wait=False) as served:
        served.bridge.startup.compiled(3, 11)
        page = show(served)
        expect(page.locator("#startup-text")).to_contain_text("compiling: 3 of 11 shapes")
        expect(page.locator("#state")).to_have_text("Loading")
        assert page.locator("#startup-bar").evaluate("bar => [bar.value, bar.max]") == [3, 11]
        loaded.set()
        served.run(served.bridge.ready())
        ready(page)
        expect(page.locator("#startup")).to_be_hidden()


@pytest.mark.parametrize("width", [320, 390, 1280])
def test_nothing_is_wider_than_the_window(served: Served, show: Open, width: int):
    page = show(served, width)
    ready(page)
    expect(page.get_by_role("img", name="Slots: 0 of 4 in use")).to_be_visible()
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width


def test_files_need_no_key_and_have_strict_headers(engine: FakeEngine):
    with serving(lambda: engine, keys=Keys(["k"])) as served:
        for path in ("/", "/page/main.js", "/page/style.css", "/page/icon.svg"):
            reply = ask(served.http.port, path)
            assert reply.status == 200, path
            policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
            assert policy["default-src"] == "'none'"
            assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
            assert reply.headers["x-content-type-options"] == "nosniff"
        assert ask(served.http.port, "/page/../main.py").status in (401, 404)
        assert ask(served.http.port, "/page/%2e%2e/main.py").status == 404
        assert ask(served.http.port, "/v1/internal/status").status == 401
        tag = ask(served.http.port, "/").headers["etag"]
        assert ask(served.http.port, "/", if_none_match=tag).status == 304


def test_files_name_no_other_host():
    for path in page_files.FOLDER.iterdir():
        hosts = set(re.findall(r"https?://[^\s\"')]+", path.read_text())) - {"http://www.w3.org/2000/svg"}
        assert hosts == set(), path.name


def test_text_has_contrast():
    """At least 4.5 to 1 (WCAG 2.2, 1.4.3), in both colour schemes."""
    light, dark = re.findall(r":root \{(.*?)\n\s*\}", (page_files.FOLDER / "style.css").read_text(), re.DOTALL)
    for scheme in (light, dark):
        colours = dict(re.findall(r"--([\w-]+): (#\w{6})", scheme))
        for ink in ("ink", "muted", "accent", "second", "bad"):
            for ground in ("panel", "bg", "field"):
                assert contrast(colours[ink], colours[ground]) >= 4.5, (ink, ground)
        assert contrast(colours["accent-ink"], colours["accent"]) >= 4.5
        assert contrast(colours["panel"], colours["bad"]) >= 4.5


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
