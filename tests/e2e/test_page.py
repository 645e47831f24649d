"""The page of the server in Chromium, on a model without weights that answers by a script.

`PAGE_PICTURES=docs pytest tests/e2e/test_page.py tests/e2e/test_serve.py -k page` writes the pictures of the docs.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the serve extra is not installed")
pytest.importorskip("uvicorn", reason="the serve extra is not installed")

from torch import Tensor

from megalith.report import read_history, render_page
from megalith.serve.http.server import bind, serve
from megalith.serve.http.settings import ServerSettings
from megalith.serve.runner import Batch
from megalith.tokenizers.chat_template import ChatTemplate

from ..fake_runner import FakeRunner
from ..unit.report.test_report import event, step, write
from ..unit.serve.http_client import LetterTokenizer, served
from .chromium import Chromium, opened

PROSE = """The **loss mask** says which tokens count: `0` for the prompt, `1` for the answer.

```python
def masked_loss(losses, mask):
    # a mean over the tokens that count
    return (losses * mask).sum() / mask.sum().clamp(min=1)
```

| tokens | counted |
|---|---:|
| of the user | no |
| of the assistant | yes |

See the [paper](https://example.org/paper).
"""
HOSTILE = """<script>window.hit = 1</script> <img src=x onerror="window.hit = 2"> [link](javascript:window.hit=3)

<svg onload="window.hit = 4"><iframe srcdoc="<script>parent.hit = 5</script>"></iframe></svg>

[a](data:text/html,<script>1</script> "x\\" onclick=window.hit=6") ![i](http://127.0.0.1:9/x.png) <form action=/x><a
href=" javascript:window.hit=7">b</a>

```html" onmouseover="window.hit=8
<style>body { display: none }</style>
```
"""
ANSWERS = {
    "How do I mask the loss of a prompt?": PROSE,
    "Attack me": HOSTILE,
    "Talk for long": "".join(f"Line {number} of a long answer that goes on and on.\n\n" for number in range(120)),
    "Shout": "HELLO!",
}
TEMPLATE = "{% for m in messages %}\x01{{ m.role }}\x02{{ m.content }}{% endfor %}\x01assistant\x02"


class WordTokenizer(LetterTokenizer):
    """One id for each word of the script and for each ASCII character, and one that ends a text."""

    _WORD = re.compile(r" ?[^\W\d_]+|.", re.DOTALL)

    def __init__(self) -> None:
        words = {word for pair in ANSWERS.items() for text in pair for word in self._WORD.findall(text)}
        self._words = [*map(chr, range(128)), *sorted(word for word in words if len(word) > 1)]
        self._ids = {word: number for number, word in enumerate(self._words)}
        self.eod = len(self._words)
        self.vocab_size, self.special_ids, self.special = self.eod + 1, frozenset({self.eod}), {"eod": self.eod}

    def encode(self, text: str) -> list[int]:
        found = self._WORD.findall(text)
        return [self._ids[part] for word in found for part in ([word] if word in self._ids else word)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("<end>" if number == self.eod else self._words[number] for number in ids)


class ScriptedModel(FakeRunner):
    """Answers the last message of a dialogue by ANSWERS; `seconds` a token."""

    seconds = 0.0

    def __init__(self, tokenizer: WordTokenizer) -> None:
        super().__init__(tokenizer.vocab_size, 8192, block_size=16, num_blocks=1024, follow=self._next)
        self.tokenizer = tokenizer

    def _next(self, tokens: Sequence[int]) -> int:
        *_, asked, said = self.tokenizer.decode(tokens).split("\x01")
        answer = self.tokenizer.encode(ANSWERS[asked.split("\x02")[1]])
        place = len(self.tokenizer.encode(said.split("\x02")[1]))
        return answer[place] if place < len(answer) else self.tokenizer.eod

    def _logits(self, tokens: Sequence[int]) -> Tensor:
        return super()._logits(tokens) * (14.0 + len(tokens) % 5 * 3.0)

    def run(self, batch: Batch) -> Tensor:
        time.sleep(self.seconds)
        return super().run(batch)


class Scripted:
    """A server of the scripted model, in a thread."""

    def __init__(self) -> None:
        self.model = ScriptedModel(WordTokenizer())
        self.listener = bind(ServerSettings(model_name="scripted", port=0))
        self.port: int = self.listener.getsockname()[1]
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    async def _run(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        settings = ServerSettings(model_name="scripted")
        tokenizer, template = self.model.tokenizer, ChatTemplate(TEMPLATE)
        async with served(
            settings=settings, template=template, runner=self.model, tokenizer=tokenizer, context_length=8192
        ) as running:

            async def ended() -> str:
                self._started.set()
                await self._over.wait()
                return "over"

            self.service = running.service
            await serve(running.app, running.service, self.listener, failed=ended, say=lambda line: None)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)


@pytest.fixture(scope="module")
def scripted() -> Iterator[Scripted]:
    server = Scripted()
    yield server
    server.close()


@pytest.fixture
def page(scripted: Scripted, tmp_path: Path) -> Iterator[Chromium]:
    scripted.model.seconds = 0.0
    with opened(tmp_path, scripted.port) as page:
        yield page
        scripted.model.seconds = 0.0


def ask(page: Chromium, text: str, *, wait: bool = True) -> None:
    """Type a text and press Enter."""
    page.run("$('prompt').focus()")
    page.call("Input.insertText", text=text)
    page.press("Enter")
    if wait:
        ended(page)


def ended(page: Chromium) -> None:
    page.wait(
        "$('halt').hidden && /in all|stopped/.test($('output').lastElementChild.querySelector('.meta').textContent)"
    )


def texts(page: Chromium) -> list[str]:
    """The messages that are shown."""
    found: list[str] = page.run(
        "[...document.querySelectorAll('#output .text')].map((text) => text.textContent.trim())"
    )
    return found


def press_button(page: Chromium, name: str, turn: int) -> None:
    page.run(f"document.querySelectorAll('#output .turn')[{turn}].querySelector('[data-do={name}]').click()")


def test_a_conversation_is_kept_edited_and_answered_again(page: Chromium, scripted: Scripted) -> None:
    question = next(iter(ANSWERS))
    page.run("$('prompt').focus()")
    page.press("Enter", 8)
    assert page.run("$('prompt').value") == "\n" and texts(page) == []
    page.run("$('prompt').value = ''")
    page.run(
        "window.heard = []; new MutationObserver(() => heard.push($('status').textContent))"
        ".observe($('status'), { childList: true })"
    )
    ask(page, question)
    assert page.run("heard.length") == 2 and "loss mask" in page.run("heard[1]")  # not token by token
    for selector in (
        "strong",
        "pre .hljs-keyword",
        "td[align=right]",
        "a[href='https://example.org/paper'][rel~=noopener]",
    ):
        assert page.run(f"document.querySelectorAll({json.dumps('.answer ' + selector)}).length") > 0, selector
    shown = texts(page)
    page.run("document.activeElement.blur()")
    page.picture("serving-chat.webp")

    page.call("Page.reload")
    page.wait(
        "window.$ && document.querySelectorAll('#output .turn').length == 2 && $('model').textContent.includes('reads')"
    )
    assert texts(page) == shown
    page.call("Browser.grantPermissions", permissions=["clipboardReadWrite", "clipboardSanitizedWrite"])
    page.call("Page.bringToFront")
    press_button(page, "copy", 1)
    page.wait("$('status').textContent == 'Copied'")
    assert page.run("navigator.clipboard.readText()") == PROSE
    press_button(page, "copy-code", 1)
    page.wait("navigator.clipboard.readText().then((text) => text.startsWith('def masked_loss'))")

    before = len(scripted.model.batches)
    press_button(page, "again", 1)
    page.wait("!$('go').hidden")
    ended(page)
    assert texts(page) == shown and len(scripted.model.batches) > before

    press_button(page, "edit", 0)
    page.run("document.activeElement.select()")
    page.call("Input.insertText", text="Shout")
    page.press("Enter")
    ended(page)
    assert texts(page) == ["Shout", "HELLO!"]
    assert page.run("document.activeElement.id") == "prompt"

    page.run("$('shade').click()")  # the view of probabilities, token by token with the keys
    page.run("document.querySelector('.answer .text').focus()")
    page.press("ArrowRight")
    assert "HELLO" in page.run("$('tip').textContent") and "%" in page.run("$('status').textContent")

    page.run("$('new').click()")
    assert texts(page) == []
    ask(page, question)
    assert page.run("[...document.querySelectorAll('.talk')].map((talk) => talk.textContent)") == [question, "Shout"]
    page.run("document.querySelectorAll('.talk')[1].click()")
    assert texts(page) == ["Shout", "HELLO!"]
    page.run("window.confirm = () => true; document.querySelectorAll('#talks .icon')[1].click()")
    assert texts(page) == [] and page.run("document.querySelectorAll('.talk').length") == 1
    assert not page.errors()


def test_what_was_written_stays_when_the_reader_stops_it_or_leaves(page: Chromium, scripted: Scripted) -> None:
    scripted.model.seconds = 0.02
    begun = "document.querySelector('.answer .text')?.textContent.includes('Line 1')"
    ask(page, "Talk for long", wait=False)
    page.wait(begun)
    page.run("$('halt').click()")
    ended(page)
    (_, answer) = texts(page)
    assert "Line 0" in answer and "Line 119" not in answer
    assert page.run("document.querySelector('.answer .meta').textContent").endswith("[stopped]")
    press_button(page, "again", 1)
    page.wait("!$('halt').hidden && " + begun)
    page.run("$('new').click()")
    assert page.run("[$('go').hidden, $('halt').hidden]") == [False, True]
    ask(page, "Shout")
    assert texts(page) == ["Shout", "HELLO!"]  # nothing of the answer that was left
    page.wait("document.querySelectorAll('.talk').length == 2")
    page.run("document.querySelector('.talk:not([aria-current])').click()")
    assert "Line 0" in texts(page)[1] and "Line 119" not in texts(page)[1]
    deadline = time.monotonic() + 10
    while scripted.service.metrics.active:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert not page.errors()


def test_an_answer_runs_nothing(page: Chromium, scripted: Scripted) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", scripted.port, timeout=30)
    connection.request("GET", "/")
    policy = connection.getresponse().headers["content-security-policy"]
    assert "default-src 'self'" in policy and "require-trusted-types-for 'script'" in policy and "unsafe" not in policy
    ask(page, "Attack me")
    shown = texts(page)[1]
    assert "<script>window.hit = 1</script>" in shown and "onerror" in shown  # as text
    page.run("for (const made of document.querySelectorAll('.answer .text *')) { made.click(); made.onmouseover?.(); }")
    page.run("new Promise((done) => setTimeout(done, 50))")
    assert page.run("window.hit") is None
    tags = set(page.run("[...document.querySelectorAll('.answer .text *')].map((made) => made.localName)"))
    assert tags <= {"p", "a", "br", "div", "pre", "code", "span", "button"}
    assert page.run("[...document.querySelectorAll('.answer a')].every((link) => !link.hasAttribute('href'))")
    names = page.run("[...document.querySelectorAll('.answer .text *')].flatMap((made) => made.getAttributeNames())")
    assert not [name for name in names if name.startswith("on") or name in ("style", "src", "srcdoc", "id")]
    asked = [e["params"]["request"]["url"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert all(url.startswith(f"http://127.0.0.1:{scripted.port}/") for url in asked)
    assert not page.errors()


FAINT = """(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const luminance = (rgb) => rgb.slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (place) => {
    for (; place; place = place.parentElement) {
      const found = numbers(getComputedStyle(place).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const place of document.body.querySelectorAll("*")) {
    const own = [...place.childNodes].some((part) => part.nodeType === 3 && part.textContent.trim());
    if (!own || !place.checkVisibility({ visibilityProperty: true }) || place.closest(":disabled")) continue;
    const [one, other] = [numbers(getComputedStyle(place).color), behind(place)].map(luminance).sort((a, b) => b - a);
    if ((one + 0.05) / (other + 0.05) < 4.5) found.push([place.outerHTML.slice(0, 80), (one + 0.05) / (other + 0.05)]);
  }
  return found;
})()"""


INSIDE = """(() => {
  const place = %s.getBoundingClientRect();
  return place.left >= 0 && place.right <= innerWidth && place.top >= 0 && place.bottom <= innerHeight;
})()"""


def test_it_fits_a_phone_and_follows_the_text(page: Chromium, scripted: Scripted, tmp_path: Path) -> None:
    page.resize(390, 844, "dark")
    ask(page, next(iter(ANSWERS)))
    for scheme in ("light", "dark"):
        page.resize(390, 844, scheme)
        assert page.run(FAINT) == []
        page.run("$('shade').click()")
        assert page.run(FAINT) == []
        page.run("$('shade').click()")
    page.picture("serving-phone.webp")

    scripted.model.seconds = 0.005
    ask(page, "Talk for long", wait=False)
    page.wait("$('output').lastElementChild.textContent.includes('Line 20')")
    assert page.run("document.documentElement.scrollWidth") == 390
    assert page.run("document.documentElement.scrollHeight") <= 844
    for place in ("$('halt')", "$('composer')", "$('output').lastElementChild.querySelector('.text').lastElementChild"):
        page.wait(INSIDE % place, 5)
    page.call("Input.dispatchMouseEvent", type="mouseWheel", x=200, y=300, deltaX=0, deltaY=-600)
    page.wait("!$('latest').hidden")
    top, length = page.run("[$('output').scrollTop, $('output').scrollHeight]")
    page.wait(f"$('output').scrollHeight > {length + 100}")
    assert page.run("$('output').scrollTop") == top
    page.run("$('latest').click()")
    assert page.run("$('output').scrollHeight - $('output').scrollTop - $('output').clientHeight") < 2
    page.run("$('halt').click()")
    ended(page)

    page.run("$('menu').click()")
    assert page.run("document.activeElement.id") == "new" and page.run(INSIDE % "$('history')")
    page.press("Escape")
    assert page.run("document.activeElement.id") == "menu" and not page.run(
        "$('history').checkVisibility({visibilityProperty: true})"
    )
    page.run(
        "$('open-settings').click(); $('system').value = 'Be short';"
        "$('system').dispatchEvent(new Event('input', { bubbles: true }))"
    )
    assert page.run("$('settings').contains(document.activeElement)") and page.run(INSIDE % "$('settings')")
    page.press("Escape")
    ask(page, "Shout")
    sent = [e["params"]["request"] for e in page.events if e["method"] == "Network.requestWillBeSent"]
    assert json.loads([one for one in sent if one["method"] == "POST"][-1]["postData"])["messages"][0] == {
        "role": "system",
        "content": "Be short",
    }
    unnamed = page.run(
        "[...document.querySelectorAll('button, input, select, textarea')].filter((one) => !one.closest('template') &&"
        " !(one.ariaLabel || one.textContent.trim() || one.labels?.length)).map((one) => one.outerHTML)"
    )
    assert unnamed == []
    assert not page.errors()

    config = {"model": {"hidden_size": 64, "num_layers": 2}, "data": {"data_path": ["x" * 200]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    history = read_history(
        write(tmp_path, event("start", 0), *(step(i, 5 - i / 10) for i in range(1, 8)), event("save", 7))
    )
    (tmp_path / "report.html").write_text(render_page(history, "a-run-of-a-long-name" * 4))
    page.call("Page.navigate", url=f"file://{tmp_path / 'report.html'}")
    page.wait("document.readyState == 'complete' && document.querySelectorAll('svg').length > 1")
    assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
