"""The page at `/` in a real browser: what a person sees, does with a mouse or a keyboard, and never runs by accident."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.engine.test_messages import ARGUMENTS, HERMES, HERMES_TEXT, WEATHER
from tests.server.conftest import TEMPLATE
from tests.server.running import Server
from tests.server.speaking import Speak

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: apt-get install chromium)")

PHONE = {"width": 390, "height": 844}
HOSTILE = (
    "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 2'> **bold** [click](javascript:window.hacked=3) "
    "<b>no markup</b>\n\n```html\n<iframe srcdoc='<script>parent.hacked=4</script>'></iframe>\n```"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


Visit = Callable[..., "Page"]


@pytest.fixture
def visit(browser: Browser) -> Iterator[Visit]:
    """Opens the page of a server; nothing may go wrong in it, and it may ask nobody but that server."""
    problems: list[str] = []
    contexts = []

    def refused(message: Any) -> None:
        # A browser tells of every answer above 399; the page deals with those.
        if message.type == "error" and "Failed to load resource" not in message.text:
            problems.append(message.text)

    def go(server: Server, **options: Any) -> Page:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 800}, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("console", refused)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on(
            "request", lambda request: request.url.startswith((server.url, "data:")) or problems.append(request.url)
        )
        page.goto(server.url)
        return page

    yield go
    for context in contexts:
        context.close()
    assert problems == []


def ask(page: Page, text: str) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")


def answered(page: Page) -> None:
    page.wait_for_selector(".message.assistant .facts span >> nth=0")
    page.wait_for_selector("#send:visible")


def test_the_page_needs_nothing_from_elsewhere_and_its_policy_says_so(server: Server) -> None:
    reply = server.get("/")
    assert reply.status == 200
    assert reply.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == policy["frame-ancestors"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["require-trusted-types-for"] == "'script'"
    nonce = re.fullmatch(r"'nonce-([0-9a-f]{24})'", policy["script-src"])
    assert nonce
    assert set(re.findall(r"<(?:script|style) nonce=\"([^\"]*)\"", reply.text)) == {nonce[1]}
    assert not re.search(r"<(?:script|style)(?! nonce=)", reply.text)
    assert nonce[1] not in server.get("/").text, "a nonce is for one answer"


def test_an_answer_streams_in_and_the_conversation_goes_on(server: Server, visit: Visit) -> None:
    page = visit(server)
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(json.loads(request.post_data or "")))
    page.fill("#system", "be brief")
    page.fill("[name=max_tokens]", "8")
    page.fill("[name=temperature]", "0")
    page.fill("[name=seed]", "3")
    ask(page, "say a tart")
    answered(page)
    first = page.inner_text(".message.assistant .facts")
    assert "8 tokens" in first
    assert "cut at the token limit" in first
    ask(page, "and another")
    page.wait_for_selector(".message.assistant >> nth=1")
    answered(page)
    first_sent, second_sent = sent
    assert first_sent["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "say a tart"},
    ]
    assert [first_sent[name] for name in ("max_tokens", "temperature", "seed", "stream")] == [8, 0, 3, True]
    assert "top_p" not in first_sent, "an empty field is not sent"
    expected = server.post("/v1/chat/completions", {**first_sent, "stream": False, "stream_options": None}).body
    said = {"role": "assistant", "content": expected["choices"][0]["message"]["content"]}
    assert second_sent["messages"][2:] == [said, {"role": "user", "content": "and another"}]
    page.click("#clear")
    assert page.locator(".message").count() == 0


def test_a_long_answer_can_be_stopped_and_the_engine_lets_go_of_it(start: Callable[..., Server], visit: Visit) -> None:
    running = start()
    page = visit(running)
    # It cannot be over before it is stopped.
    os.kill(running.engine_pid(), signal.SIGSTOP)
    ask(page, "say a tart")
    page.wait_for_selector("#stop:visible")
    page.keyboard.press("Escape")
    page.wait_for_selector("#send:visible")
    assert "stopped by you" in page.inner_text(".message.assistant .facts")
    assert page.input_value("#input") == "say a tart", "there was no answer yet: one can ask again"
    os.kill(running.engine_pid(), signal.SIGCONT)
    assert running.wait_idle()


def test_what_a_model_writes_is_text_and_never_runs(speak: Speak, visit: Visit) -> None:
    page = visit(speak(HOSTILE, TEMPLATE, ()))
    page.fill("[name=max_tokens]", "400")
    page.fill("[name=temperature]", "0")
    ask(page, "<img src=x onerror='window.hacked = 5'>")
    answered(page)
    shown = page.inner_text(".message.assistant .markdown")
    for text in (
        "<script>window.hacked = 1</script>",
        "<img src=x onerror=",
        "[click](javascript:window.hacked=3)",
        "<b>no markup</b>",
        "<iframe",
    ):
        assert text in shown, shown
    assert page.inner_text(".message.user .body") == "<img src=x onerror='window.hacked = 5'>"
    assert page.inner_text(".message.assistant strong") == "bold"
    assert page.locator(".messages :is(script, img, iframe, b, a)").count() == 0
    assert page.evaluate("window.hacked") is None


def test_reasoning_and_calls_are_shown_apart_and_a_result_goes_back(speak: Speak, visit: Visit) -> None:
    page = visit(speak(HERMES_TEXT, HERMES, ()))
    sent: list[dict[str, Any]] = []
    page.on("request", lambda request: request.method == "POST" and sent.append(json.loads(request.post_data or "")))
    page.fill("[name=temperature]", "0")
    page.fill("[name=max_tokens]", "500")
    page.fill("#tools", "{not json")
    ask(page, "hi")
    assert "no valid JSON" in page.inner_text("#tools-error")
    assert sent == []
    page.fill("#tools", json.dumps([WEATHER]))
    page.press("#input", "Enter")
    answered(page)
    calls = page.locator(".call")
    assert calls.count() == 2
    assert page.locator(".thinking").get_attribute("open") is None, "reasoning is folded away once there is an answer"
    assert page.locator(".thinking div").text_content()
    assert calls.nth(0).locator("header code").inner_text() == "weather"
    assert json.loads(calls.nth(0).locator("pre").inner_text()) == ARGUMENTS
    for place in range(2):
        calls.nth(place).locator("input").fill(f"result {place}")
        calls.nth(place).locator("input").press("Enter")
    page.wait_for_selector(".message.assistant >> nth=1")
    assert [message["role"] for message in sent[-1]["messages"]] == ["user", "assistant", "tool", "tool"]
    assert sent[-1]["messages"][-1]["content"] == "result 1"


def test_an_error_is_told_and_the_question_comes_back(server: Server, visit: Visit) -> None:
    page = visit(server)
    page.fill("[name=temperature]", "-1")
    ask(page, "say a tart")
    page.wait_for_selector(".failure")
    assert "temperature" in page.inner_text(".failure")
    assert page.input_value("#input") == "say a tart"


def test_the_engine_is_shown_as_it_is(start: Callable[..., Server], visit: Visit) -> None:
    running = start("--num-gpu-blocks-override", "65")
    body = {"prompt": list(range(5, 53)), "max_tokens": 6, "n": 2, "ignore_eos": True}
    assert running.post("/v1/completions", body).status == 200
    assert running.wait_idle()
    state = running.get("/engine/state").body
    cells = state["engine"]["map"]["cells"]
    assert len(cells) == 64
    assert [sum(column) for column in zip(*cells, strict=True)] == [61, 0, 0, 3]
    assert state["engine"]["tree"]["blocks"] == 3
    steps = state["engine"]["steps"]
    assert sum(step["prefill_tokens"] for step in steps) == 48 + 16, (
        "the second choice hits all but the last block of the prompt"
    )
    assert sum(step["decode_tokens"] for step in steps) == 10
    assert sum(state["metrics"]["time_to_first_token"]["counts"]) == 2
    # Tokens that reach a slow front together are one wait: as many as Prometheus is told of.
    counted = re.search(r"^octavo:inter_token_latency_seconds_count (\d+)$", running.get("/metrics").text, re.MULTILINE)
    assert counted
    assert sum(state["metrics"]["inter_token_latency"]["counts"]) == int(counted[1]) > 0
    page = visit(running)
    page.click("#tab-engine")
    page.wait_for_selector("#steps svg")
    assert page.inner_text("#tiles").count("12 since the start") == 1
    assert "61 free" in (page.get_attribute("#pool", "aria-label") or "")
    assert "3 blocks on 1 paths" in page.inner_text("#tree-note")
    assert "2 since the start" in page.inner_text("#ttft-note")
    assert page.locator("#steps svg path").count() == len(steps) * 2
    assert "Not calibrated" in page.inner_text("#limit")
    # It is live.
    assert running.post("/v1/completions", {**body, "n": 1}).status == 200
    page.wait_for_selector("#tiles >> text=18 since the start")


def test_each_of_many_engines_can_be_looked_at(start: Callable[..., Server], visit: Visit) -> None:
    running = start("--data-parallel-size", "2", "--num-gpu-blocks-override", "65")
    reply = running.get("/engine/state?engine=2")
    assert (reply.status, reply.body["error"]["param"]) == (400, "engine")
    page = visit(running)
    page.click("#tab-engine")
    page.wait_for_selector("#engine-choice:visible")
    assert page.locator("#engine-number option").all_inner_texts() == ["0", "1"]
    with page.expect_response(lambda response: response.url.endswith("?engine=1")) as found:
        page.select_option("#engine-number", "1")
    assert found.value.json()["engines"] == 2


def test_the_distance_to_the_limit_is_bytes_over_a_measured_bandwidth(
    start: Callable[..., Server], visit: Visit, tmp_path: Path
) -> None:
    from octavo.analysis import bandwidth

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OCTAVO_CACHE", str(tmp_path))
        bandwidth.remember(1e6)
        assert bandwidth.remembered() == 1e6
    running = start(OCTAVO_CACHE=str(tmp_path))
    assert running.post("/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 12, "ignore_eos": True}).status == 200
    state = running.get("/engine/state").body
    assert state["read_bandwidth"] == 1e6
    decodes = [step for step in state["engine"]["steps"] if step["decode_tokens"] and not step["prefill_tokens"]]
    # Two key-value heads or so of few numbers: each step reads as many bytes more as a token has.
    gained = {later["kv_bytes"] - sooner["kv_bytes"] for sooner, later in itertools.pairwise(decodes)}
    assert gained == {state["engine"]["bytes_per_block"] // state["engine"]["block_size"]}
    needed = sum(state["weight_bytes"] + step["kv_bytes"] for step in decodes) / 1e6
    share = needed / (sum(step["duration_us"] for step in decodes) / 1e6)
    page = visit(running)
    page.click("#tab-engine")
    shown = page.inner_text("#limit .limit-value")
    assert float(shown.split()[0]) == pytest.approx(share * 100, rel=0.06, abs=0.6)


def test_everything_can_be_done_with_a_keyboard(server: Server, visit: Visit) -> None:
    page = visit(server)
    assert page.evaluate("document.activeElement.id") == "input", "one can type at once"
    page.fill("[name=max_tokens]", "3")
    page.focus("#input")
    page.keyboard.type("one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("two")
    page.keyboard.press("Enter")
    answered(page)
    assert page.locator(".message.user .body").inner_text() == "one\ntwo"
    assert page.evaluate("document.activeElement.id") == "input", "one can go on typing"
    page.focus("#tab-chat")
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.id") == "tab-engine"
    assert page.is_visible("#panel-engine")
    assert not page.is_visible("#panel-chat")
    page.keyboard.press("ArrowLeft")
    assert page.is_visible("#panel-chat")
    # From the first element on, Tab reaches everything that can be used, and shows where it is.
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate(
            "document.activeElement.id || document.activeElement.name || document.activeElement.tagName"
        )
        if focused not in ("BODY", "input"):
            outline = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
            assert outline != "none", focused
        reached.add(focused)
    assert {
        "tab-chat",
        "input",
        "send",
        "clear",
        "system",
        "temperature",
        "top_p",
        "top_k",
        "max_tokens",
        "seed",
        "tools",
    } <= reached


def test_every_field_and_drawing_has_a_name(server: Server, visit: Visit) -> None:
    page = visit(server)
    page.click("#tab-engine")
    page.wait_for_selector("#tiles dt")
    nameless = page.evaluate(
        """[...document.querySelectorAll('button, input, textarea, canvas, svg[role=img], [role=region]')]
            .filter((element) => !(element.labels?.length || element.getAttribute('aria-label') || element.textContent.trim()))
            .map((element) => element.outerHTML)"""
    )
    assert nameless == []
    assert page.get_attribute("html", "lang") == "en"


def contrast(page: Page, selector: str) -> float:
    """Of an element's text with what is behind it, as WCAG defines it."""
    ratio: float = page.evaluate(
        """(selector) => {
            const parse = (text) => text.match(/[\\d.]+/g).map(Number);
            const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
            const light = (rgb) => rgb.slice(0, 3).map((c) => linear(c / 255))
                .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
            let element = document.querySelector(selector);
            const ink = light(parse(getComputedStyle(element).color));
            let behind = [0, 0, 0, 0];
            while (behind[3] === 0) {
                const found = parse(getComputedStyle(element).backgroundColor);
                behind = found.length === 3 ? [...found, 1] : found;
                element = element.parentElement;
            }
            const ground = light(behind);
            return (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
        }""",
        selector,
    )
    return ratio


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_themes_can_be_read_and_a_phone_needs_no_sideways_scrolling(
    server: Server, visit: Visit, scheme: str
) -> None:
    page = visit(server, color_scheme=scheme, viewport=PHONE)
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(int(part) for part in re.findall(r"\d+", background)[:3]) / 3
    assert (brightness > 128) == (scheme == "light")
    for selector in (".welcome h2", ".welcome p", ".hint", "#send", "#tab-engine", "#status", "#clear"):
        assert contrast(page, selector) >= 4.5, selector
    page.click("#tab-engine")
    page.wait_for_selector("#tiles dt")
    for selector in ("#tiles dt", "#tiles dd", "#tiles .under", "#h-pool", "#pool-legend li", ".card .note"):
        assert contrast(page, selector) >= 4.5, selector
    for panel in ("#panel-engine", "body"):
        assert page.evaluate(
            "(panel) => { const e = document.querySelector(panel); return e.scrollWidth <= e.clientWidth }", panel
        )


def test_the_page_asks_for_a_key_where_one_is_needed_and_keeps_it_for_the_tab(
    start: Callable[..., Server], visit: Visit
) -> None:
    running = start("--api-key", "secret")
    for path in ("/engine/state", "/openapi.json"):
        assert running.get(path).status == 401
    page = visit(running)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", "wrong")
    page.press("#key", "Enter")
    page.wait_for_selector("#key-error >> text=does not take")
    page.fill("#key", "secret")
    page.press("#key", "Enter")
    page.wait_for_selector("#status[data-status=ready]")
    assert page.evaluate("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
    page.reload()
    page.wait_for_selector("#status[data-status=ready]")
    assert not page.is_visible("#key-dialog")
