"""Drives the web page in headless Chromium, over the browser's debugging pipe, so that nothing but Python is needed.

    page.py URL KEY TOOLS CHROMIUM SHOTS CARD

URL: a server on models/tiny-v4 that wants KEY. TOOLS: a file of tool requests, a JSON object a line. SHOTS: folder for screenshots. CARD: the same
server with the model on a card.
"""
import atexit
import base64
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from queue import Empty, Queue


class Browser:
    """One page of one browser: commands, and events in the order they came."""

    def __init__(self, program, profile):
        r_in, self.to = os.pipe()
        self.out, w_out = os.pipe()

        def pipes():
            a, b = os.dup(r_in), os.dup(w_out)
            os.dup2(a, 3)
            os.dup2(b, 4)

        self.process = subprocess.Popen(
            [program, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars",
             "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-extensions",
             "--disable-dev-shm-usage", "--user-data-dir=" + profile, "about:blank"],
            preexec_fn=pipes, pass_fds=(3, 4), stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        atexit.register(self.process.kill)
        os.close(r_in)
        os.close(w_out)
        self.answers, self.events, self.number = {}, [], 0
        self.inbox = Queue()
        threading.Thread(target=self.read, daemon=True).start()
        target = next(t for t in self.call("Target.getTargets", session=None)["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", session=None, targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in "Page", "Runtime", "Network", "Log":
            self.call(domain + ".enable")

    def read(self):
        held = b""
        while part := os.read(self.out, 1 << 16):
            *whole, held = (held + part).split(b"\0")
            for text in whole:
                self.inbox.put(json.loads(text))
        self.inbox.put(None)

    def pump(self, seconds):
        message = self.inbox.get(timeout=seconds)
        assert message is not None, "the browser ended"
        if "id" in message:
            self.answers[message["id"]] = message
        else:
            self.events.append(message)

    def call(self, method, session="", **params):
        self.number += 1
        number = self.number
        message = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while number not in self.answers:
            self.pump(60)
        answer = self.answers.pop(number)
        assert "error" not in answer, (method, answer["error"])
        return answer["result"]

    def js(self, text):
        r = self.call("Runtime.evaluate", expression=text, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in r, (text, r["exceptionDetails"])
        return r["result"].get("value")

    def until(self, text, what, seconds=60):
        """Waits, in the page, for an expression to hold: it is looked at in every frame that the page draws."""
        ok = self.js("new Promise((ok) => { const end = Date.now() + %d; const look = () => { let v = false; try { v = (%s); } catch {} "
                     "if (v || Date.now() > end) ok(!!v); else setTimeout(look, 20); }; look(); })" % (seconds * 1000, text))
        assert ok, "%s: did not come about: %s\n%s" % (what, text, self.js("document.body.innerText"))

    def seen(self, method):
        try:
            while True:
                self.pump(0)
        except Empty:
            pass
        return [e["params"] for e in self.events if e["method"] == method]

    def press(self, key, code=None, modifiers=0, text=None):
        common = {"key": key, "code": code or key, "modifiers": modifiers, "windowsVirtualKeyCode": {"Enter": 13, "Escape": 27, "Tab": 9}.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **({"text": text} if text else {}))
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def write(self, text):
        self.call("Input.insertText", text=text)

    def go(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState == 'complete' && document.getElementById('model').textContent", "the page")

    def shot(self, path):
        data = base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])
        with open(path, "wb") as f:
            f.write(data)
        assert len(data) < 150_000, "%s has %d bytes" % (path, len(data))

    def size(self, width, height, scale=1, mobile=False):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)

    def scheme(self, name):
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])


def main(url, key, tools_file, program, shots, card):
    profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    b = Browser(program, profile.name)

    def server(path):
        request = urllib.request.Request(url + path, headers={"x-api-key": key})
        with urllib.request.urlopen(request) as r:
            return json.load(r)

    def bodies():
        return [json.loads(e["request"]["postData"]) for e in b.seen("Network.requestWillBeSent") if "postData" in e["request"]]

    def setting(name, value):
        b.js("{ const e = document.getElementById(%s); e.value = %s; e.dispatchEvent(new Event('change', {bubbles: true})); }"
             % (json.dumps(name), json.dumps(value)))

    def answered(count):
        b.until("document.querySelectorAll('.turn.assistant').length == %d && document.getElementById('stop').hidden" % count, "answer %d" % count)

    last = "document.querySelector('.turn.assistant:last-of-type')"
    b.size(1180, 760)
    b.scheme("light")

    # Without a key the page is there, says what it needs, and asks for it when the server refuses.
    b.go(url + "/")
    b.until("document.getElementById('model').textContent == 'needs an API key'", "the key is asked for")
    assert b.js("document.activeElement.id") == "text", "the message field has the focus"
    b.write("What is the capital of France?")
    b.press("Enter", text="\r")
    b.until("document.querySelector('.turn.assistant .error')", "the refusal is shown")
    assert not b.js("document.getElementById('settings').hidden"), "the settings open for the key"
    assert b.js("document.activeElement.id") == "key"
    b.write(key)
    b.press("Tab")
    b.until("document.getElementById('model').textContent == 'DeepSeek-V4-Flash'", "the model's name")
    assert b.js("sessionStorage.getItem('affinity.key')") == key
    assert b.js("Object.values(localStorage).join().includes(%s)" % json.dumps(key)) is False, "the key is in this tab only"
    setting("temperature", "0")
    b.press("Escape")
    assert b.js("document.getElementById('settings').hidden"), "Escape closes the panel"
    b.js("document.getElementById('new').click()")
    print("page: key asked for and kept for the tab")

    # Streaming, reasoning folded. Shift+Enter breaks the line, Enter sends.
    b.js("window.lengths = []; new MutationObserver(() => { const t = document.querySelector('.turn.assistant');"
         " if (t) lengths.push(t.textContent.length); }).observe(document.getElementById('log'), {childList: true, subtree: true, characterData: true})")
    b.write("What is the capital")
    b.press("Enter", modifiers=8, text="\r")
    b.write("of France?")
    b.press("Enter", text="\r")
    b.until("%s && %s.textContent.length > 1" % (last, last), "text appears")
    answered(1)
    lengths = b.js("[...new Set(lengths)]")
    assert len(lengths) >= 2, "the text grew: %s" % lengths
    assert b.js("document.querySelector('.turn.user .body').textContent") == "What is the capital\nof France?"
    assert b.js("document.querySelector('details.reasoning').open") is False, "reasoning is folded"
    assert len(b.js("document.querySelector('details.reasoning div').textContent")) > 0
    sent = bodies()[-1]
    assert sent["stream"] is True and sent["temperature"] == 0 and sent["reasoning_effort"] == "high", sent
    assert "top_p" not in sent and "seed" not in sent, sent
    b.until("/^\\d+ of 8,192 tokens/.test(document.getElementById('meter-text').textContent)", "the meter")
    print("page: answered in %d steps, reasoning folded" % len(lengths))

    # Settings reach the server; a second turn sends the first.
    for name, value in (("effort", "none"), ("top_p", "0.5"), ("top_k", "40"), ("min_p", "0.1"), ("seed", "7"), ("max_tokens", "300")):
        setting(name, value)
    b.js("document.getElementById('text').focus()")
    b.write("What is the capital of Japan?")
    b.press("Enter", text="\r")
    answered(2)
    sent = bodies()[-1]
    want = {"top_p": 0.5, "top_k": 40, "min_p": 0.1, "seed": 7, "max_tokens": 300, "thinking": {"type": "disabled"}}
    assert {k: sent.get(k) for k in want} == want and "reasoning_effort" not in sent, sent
    assert [m["role"] for m in sent["messages"]] == ["user", "assistant", "user"], sent
    answer = b.js(last + ".querySelector('.body').textContent")
    assert "Tokyo" in answer, answer
    print("page: settings and history sent; %r" % answer)

    # A tool call is shown, its result is sent.
    with open(tools_file) as f:
        case = json.loads(f.readline())
    setting("tools", json.dumps([{"type": "function", "function": t} for t in case["tools"]]))
    setting("system", "You are a helpful assistant.")
    b.js("document.getElementById('new').click()")
    b.js("document.getElementById('text').focus()")
    b.write(case["prompt"].rsplit("<｜User｜>", 1)[1].split("<｜Assistant｜>")[0])
    b.press("Enter", text="\r")
    answered(1)
    b.until("document.querySelector('.call b') && document.querySelector('form.call textarea')", "a call")
    name = b.js("document.querySelector('.call b').textContent")
    assert name == case["call"]["name"], name
    assert json.loads(b.js("document.querySelector('.call pre').textContent")) == case["call"]["arguments"]
    b.shot(os.path.join(shots, "page-tools.png"))
    b.js("document.querySelector('form.call textarea').value = '{\"ok\": true}'; document.querySelector('form.call button').click()")
    answered(2)
    roles = [m["role"] for m in bodies()[-1]["messages"] if m["role"] != "system"]
    assert roles == ["user", "assistant", "tool"], roles
    setting("tools", "")
    setting("system", "")
    print("page: call of %s shown, result sent" % name)

    # Stop: the answer ends, the server's slots are free.
    b.js("document.getElementById('new').click()")
    for name, value in (("temperature", "1.5"), ("top_p", "1"), ("top_k", ""), ("min_p", ""), ("max_tokens", "")):
        setting(name, value)
    for seed in range(1, 40):
        setting("seed", str(seed))
        b.js("document.getElementById('text').focus()")
        b.write("Write a Python module.")
        b.press("Enter", text="\r")
        b.until("(%s && %s.querySelector('.body').textContent.length > 40) || document.getElementById('stop').hidden" % (last, last), "some text")
        if b.js("!document.getElementById('stop').hidden"):
            break
        b.js("document.getElementById('new').click()")
    b.press("Escape") if seed % 2 else b.js("document.getElementById('stop').click()")
    b.until("document.getElementById('stop').hidden && %s.textContent.includes('stopped')" % last, "stopped")
    # It had come while the answer ran: that is streaming.
    kept = b.js(last + ".querySelector('.body').textContent")
    assert len(kept) > 40
    deadline = time.monotonic() + 30
    while any(s["is_processing"] for s in server("/slots")):
        assert time.monotonic() < deadline, "a slot is still busy"
    print("page: stopped, slots free")

    # Hostile text stays text. The conversation survives a reload.
    hostile = ("# Title\n\n<img src=x onerror=\"window.bad=1\"> <script>window.bad=1</script> [a](javascript:window.bad=1) "
               "[b](https://example.org/x) **bold** `code<b>`\n\n```html\n<script>window.bad=1</script>\n```\n\n* one\n  * inner\n* two\n\n"
               "| a | b |\n|---|---|\n| 1 | <i>2</i> |\n")
    b.js("localStorage.setItem('affinity.chat', JSON.stringify([{role: 'user', content: '<b>hello</b>'}, "
         "{role: 'assistant', content: %s, reasoning: '<u>thought</u>', calls: [], began: 1, ended: 2}]))" % json.dumps(hostile))
    b.go(url + "/")
    assert b.js("window.bad") is None
    assert b.js("document.querySelectorAll('#log img, #log script, #log b, #log u, #log i').length") == 0
    assert b.js("[...document.querySelectorAll('#log a')].map((a) => a.href)") == ["https://example.org/x"]
    assert b.js("document.querySelectorAll('#log li').length") == 3 and b.js("document.querySelectorAll('#log li li').length") == 1
    assert b.js("document.querySelector('#log figure code').textContent") == "<script>window.bad=1</script>"
    assert b.js("document.querySelector('#log td:nth-child(2)').textContent") == "<i>2</i>"
    print("page: hostile text is text")

    # Pictures: a conversation worth showing, with the machine, in both schemes and on a phone.
    b.js("localStorage.clear()")
    b.size(1180, 820)
    b.go(url + "/")
    setting("temperature", "0")
    b.js("document.getElementById('show-machine').click()")
    b.until("document.querySelectorAll('#host .track').length == 4 && document.getElementById('plane').width == 16", "the machine")
    b.js("document.getElementById('text').focus()")
    for i, question in enumerate(("What is the capital of France?", "Write a Python function that returns the sum of a list.")):
        setting("effort", ("high", "none")[i])
        b.write(question)
        b.press("Enter", text="\r")
        answered(i + 1)
    b.until("/[1-9]/.test(document.getElementById('decode-rate').textContent)", "the rate of the last second")
    assert b.js("document.getElementById('plane').height") == 6
    assert "on disk" in b.js("document.getElementById('plane').getAttribute('aria-label')")
    colours = b.js("{ const c = document.getElementById('plane'); const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;"
                   " new Set(Array.from({length: d.length / 4}, (_, i) => d.slice(4 * i, 4 * i + 3).join())).size }")
    assert colours > 3, "the plane shows how hot experts are: %d colours" % colours
    b.shot(os.path.join(shots, "page-light.png"))
    b.scheme("dark")
    b.until("getComputedStyle(document.body).backgroundColor == 'rgb(20, 25, 23)'", "dark colours")
    b.shot(os.path.join(shots, "page-dark.png"))
    b.js("document.querySelector('#machine .close').click()")
    b.size(390, 780, 1, True)
    b.go(url + "/")
    assert b.js("document.documentElement.scrollWidth <= innerWidth"), "nothing is wider than a phone"
    b.shot(os.path.join(shots, "page-phone.png"))
    b.js("document.getElementById('show-settings').click()")
    assert b.js("document.documentElement.scrollWidth <= innerWidth")
    b.shot(os.path.join(shots, "page-phone-settings.png"))
    print("page: light, dark, phone")

    # A model on a card: its memory by what it is for, and its experts there.
    b.size(1180, 940)
    b.scheme("light")
    b.go(card + "/")
    setting("key", key)
    setting("effort", "none")
    setting("temperature", "0")
    if b.js("document.getElementById('machine').hidden"):
        b.js("document.getElementById('show-machine').click()")
    b.js("document.getElementById('text').focus()")
    b.write("What is the capital of France?")
    b.press("Enter", text="\r")
    answered(1)
    b.until("/[1-9][0-9]* of [0-9]+ of few rows/.test(document.getElementById('card-notes').textContent)", "the card's passes")
    assert not b.js("document.getElementById('cards').hidden")
    assert b.js("document.getElementById('card-name').textContent") == "emu:0 emulated device, nv"
    names = b.js("Array.from(document.querySelectorAll('#card > span:nth-child(3n+1)'), (e) => e.textContent).join()")
    assert names == "weights,experts,state,buffers,others,free", names
    assert "96 on a card, 0 in host memory, 0 on disk" in b.js("document.getElementById('plane').getAttribute('aria-label')")
    b.shot(os.path.join(shots, "page-card.png"))
    print("page: a model on a card")

    # Nothing came from elsewhere, nothing was blocked or thrown.
    asked = [e["request"]["url"] for e in b.seen("Network.requestWillBeSent")]
    assert all(u.startswith((url, card)) for u in asked), [u for u in asked if not u.startswith((url, card))]
    bad = [e["entry"]["text"] for e in b.seen("Log.entryAdded") if e["entry"]["level"] == "error" and "401" not in e["entry"]["text"]]
    assert not bad, bad
    thrown = b.seen("Runtime.exceptionThrown")
    assert not thrown, thrown
    b.call("Browser.close", session=None)
    b.process.wait(30)
    print("page: %d requests, all to the server" % len(asked))


if __name__ == "__main__":
    main(*sys.argv[1:])
