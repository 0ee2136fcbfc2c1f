"""Forms of answers through the official openai and anthropic packages, against a running server on models/tiny-v4: response formats, forced
calls, several calls, schemas that are refused, and clients that leave. Argument: BASE_URL. Every value is validated by the jsonschema
package."""
import asyncio
import enum
import json
import sys
import time
import urllib.request

import anthropic
import jsonschema
import openai
import pydantic

url = sys.argv[1]
oai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
ant = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
ASK = [{"role": "user", "content": "Describe a product of the shop."}]
OFF = {"thinking": {"type": "disabled"}}
ON = {"thinking": {"type": "enabled"}}
LIMIT = 400
SEEDS = (1, 2, 3)
SCHEMA = {
    "type": "object",
    "properties": {
        "sku": {"type": "string", "pattern": "^[A-Z]{2}-\\d{3}$"},
        "title": {"type": "string", "minLength": 1, "maxLength": 40},
        "stock": {"type": "integer", "minimum": 0, "maximum": 500},
        "price": {"type": "number", "exclusiveMinimum": 0},
        "state": {"enum": ["new", "used", "größer"]},
        "since": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "parts": {"type": "array", "items": {"$ref": "#/$defs/part"}, "minItems": 1, "maxItems": 3},
    },
    "required": ["sku", "title", "stock", "price", "state", "since", "parts"],
    "additionalProperties": False,
    "$defs": {"part": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 20}, "spare": {"type": "boolean"}},
                       "required": ["name", "spare"], "additionalProperties": False}},
}
UNSUPPORTED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}, "required": ["a"], "additionalProperties": False}
POINTER = "/properties/a"
TOOLS = [
    {"name": "roll_dice", "description": "Roll dice", "parameters": {"type": "object", "properties": {
        "faces": {"type": "integer", "minimum": 2, "maximum": 100}, "count": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["faces", "count"], "additionalProperties": False}},
    {"name": "book", "description": "Book a room", "parameters": {"type": "object", "properties": {
        "room": {"enum": ["garden", "tower", "部屋"]}, "day": {"type": "string", "format": "date"},
        "guests": {"type": "array", "items": {"type": "string", "maxLength": 20}, "minItems": 1, "maxItems": 3},
        "contact": {"type": "object", "properties": {"mail": {"type": "string", "format": "email"}}, "required": ["mail"], "additionalProperties": False},
        "quiet": {"type": ["boolean", "null"]}},
        "required": ["room", "day", "guests", "contact", "quiet"], "additionalProperties": False}},
]
BY_NAME = {t["name"]: t["parameters"] for t in TOOLS}
TASK = [{"role": "user", "content": "Throw a 6 sided dice 2 times, then throw a 20 sided dice 3 times."}]
passed = 0


class State(str, enum.Enum):
    new = "new"
    used = "used"


class Part(pydantic.BaseModel):
    name: str
    spare: bool


class Product(pydantic.BaseModel):
    """What the packages make schemas of, and read answers into."""
    title: str
    stock: int
    state: State
    since: str | None
    parts: list[Part]


def check(name, ok, got=None):
    global passed
    if not ok:
        sys.exit(f"FAILED: {name}: {got!r}")
    passed += 1


def wrong(schema, text):
    """What is wrong with a value's text, None if it fits."""
    try:
        value = json.loads(text)
    except ValueError as e:
        return f"no JSON: {e}"
    draft = jsonschema.Draft202012Validator
    errors = [e.message for e in draft(schema, format_checker=draft.FORMAT_CHECKER).iter_errors(value)]
    return errors[0] if errors else None


def fits(name, schema, text, got):
    why = wrong(schema, text)
    check(name, why is None, (why, got))


def refused(name, kind, fn, *parts):
    """The error of a request that must be refused; its message has the parts."""
    try:
        fn()
    except kind as e:
        check(name, e.status_code == 400 and all(p in e.message for p in parts), e)
        return e
    sys.exit(f"FAILED: {name}: no {kind.__name__}")


# ---- each dialect, whole and as a stream: text, reasoning, calls [(id, name, arguments)], how it ended ----
def chat(stream, messages, seed, think=False, **kw):
    kw = dict(model="m", messages=messages, seed=seed, max_tokens=LIMIT, extra_body=ON if think else OFF) | kw
    if not stream:
        r = oai.chat.completions.create(**kw).choices[0]
        return r.message.content or "", getattr(r.message, "reasoning_content", None) or "", [
            (c.id, c.function.name, c.function.arguments) for c in r.message.tool_calls or []], r.finish_reason
    text, reasoning, calls, finish = "", "", {}, None
    for c in oai.chat.completions.create(stream=True, **kw):
        d, finish = c.choices[0].delta, c.choices[0].finish_reason or finish
        text += d.content or ""
        reasoning += getattr(d, "reasoning_content", None) or ""
        for t in d.tool_calls or []:
            call = calls.setdefault(t.index, ["", "", ""])
            call[0] += t.id or ""
            call[1] += t.function.name or ""
            call[2] += t.function.arguments or ""
    check("indices of calls", list(calls) == list(range(len(calls))), calls)
    return text, reasoning, [tuple(c) for c in calls.values()], finish


def responses(stream, messages, seed, think=False, **kw):
    kw = dict(model="m", input=messages, max_output_tokens=LIMIT, reasoning={"effort": "high" if think else "none"}, extra_body={"seed": seed}) | kw
    if not stream:
        r = oai.responses.create(**kw)
    else:
        events = list(oai.responses.create(stream=True, **kw))
        r = events[-1].response
        text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
        check("responses: pieces make the text", text == r.output_text, (text, r))
        for o in (o for o in r.output if o.type == "function_call"):
            pieces = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta" and e.item_id == o.id)
            check("responses: pieces make the arguments", pieces == o.arguments, (pieces, o))
    reasoning = "".join(c.text for o in r.output if o.type == "reasoning" for c in o.content or [])
    calls = [(o.call_id, o.name, o.arguments) for o in r.output if o.type == "function_call"]
    return r.output_text, reasoning, calls, "tool_calls" if calls and r.status == "completed" else {"completed": "stop"}.get(r.status, r.status)


def messages(stream, turns, seed, think=False, **kw):
    kw = dict(model="m", messages=turns, max_tokens=LIMIT + 1024 * think, extra_body={"seed": seed}) | kw
    if think:
        kw["thinking"] = {"type": "enabled", "budget_tokens": 1024}
    if not stream:
        r = ant.messages.create(**kw)
    else:
        with ant.messages.stream(**kw) as s:
            r = s.get_final_message()
    text = "".join(b.text for b in r.content if b.type == "text")
    reasoning = "".join(b.thinking for b in r.content if b.type == "thinking")
    calls = [(b.id, b.name, json.dumps(b.input)) for b in r.content if b.type == "tool_use"]
    return text, reasoning, calls, {"end_turn": "stop", "tool_use": "tool_calls"}.get(r.stop_reason, r.stop_reason)


def tools_of(ask, tools, strict):
    if ask is chat:
        return [{"type": "function", "function": t | {"strict": strict}} for t in tools]
    if ask is responses:
        return [{"type": "function", "strict": strict} | t for t in tools]
    return [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"], "strict": strict} for t in tools]


def form_of(ask, schema):
    if ask is chat:
        return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}
    if ask is responses:
        return {"text": {"format": {"type": "json_schema", "name": "x", "strict": True, "schema": schema}}}
    return {"output_config": {"format": {"type": "json_schema", "schema": schema}}}


def choice_of(ask, which, one=False):
    """auto, required or a function's name; one: at most one call."""
    named = which not in ("auto", "required")
    if ask is messages:
        c = {"type": "tool", "name": which} if named else {"type": {"required": "any"}.get(which, which)}
        return {"tool_choice": c | ({"disable_parallel_tool_use": True} if one else {})}
    c = which if not named else {"type": "function", "function": {"name": which}} if ask is chat else {"type": "function", "name": which}
    return {"tool_choice": c} | ({"parallel_tool_calls": False} if one else {})


DIALECTS = (chat, responses, messages)
BOTH = ((False, ""), (True, " stream"))


# ---- response formats ----
def formats():
    for ask in DIALECTS:
        for stream, kind in BOTH:
            name = ask.__name__ + kind
            for seed in SEEDS:
                text, _, calls, end = ask(stream, ASK, seed, **form_of(ask, SCHEMA))
                check(f"{name}: schema ends", end == "stop" and not calls, (text, end))
                fits(f"{name}: schema", SCHEMA, text, text)
            text, reasoning, _, end = ask(stream, ASK, 4, think=True, **form_of(ask, SCHEMA))
            check(f"{name}: schema, thinking", end == "stop" and reasoning, (text, reasoning, end))
            fits(f"{name}: schema behind reasoning", SCHEMA, text, text)
            text, _, _, end = ask(stream, ASK, 5, **form_of(ask, SCHEMA) | {"max_output_tokens" if ask is responses else "max_tokens": 150})
            check(f"{name}: closed before the budget ends", end == "stop", (text, end))
            fits(f"{name}: schema, small budget", SCHEMA, text, text)
            text, _, calls, end = ask(stream, ASK, 6, tools=tools_of(ask, TOOLS, True), **form_of(ask, SCHEMA))
            check(f"{name}: a value or calls", end == ("tool_calls" if calls else "stop"), (text, calls, end))
            for c in calls:
                fits(f"{name}: call beside a format", BY_NAME[c[1]], c[2], c)
            if not calls:
                fits(f"{name}: value beside tools", SCHEMA, text, text)
    for stream, kind in BOTH:
        for seed in SEEDS:
            text, _, _, end = chat(stream, ASK, seed, response_format={"type": "json_object"})
            check(f"chat{kind}: json_object ends", end == "stop", (text, end))
            fits(f"chat{kind}: json_object", {"type": "object"}, text, text)
            text, _, _, end = responses(stream, ASK, seed, text={"format": {"type": "json_object"}})
            check(f"responses{kind}: json_object ends", end == "stop", (text, end))
            fits(f"responses{kind}: json_object", {"type": "object"}, text, text)
    r = oai.chat.completions.create(model="m", messages=ASK, n=3, seed=7, max_tokens=LIMIT, extra_body=OFF, **form_of(chat, SCHEMA))
    for c in r.choices:
        fits("chat: each of several choices", SCHEMA, c.message.content, c)
    r = oai.completions.create(model="m", prompt="A product: ", seed=8, max_tokens=LIMIT, extra_body=form_of(chat, SCHEMA))
    fits("completions: schema", SCHEMA, r.choices[0].text, r)
    text, _, _, end = messages(False, ASK, 9, extra_body={"seed": 9, "output_format": {"type": "json_schema", "schema": SCHEMA}})
    fits("messages: output_format", SCHEMA, text, text)


def helpers():
    """The packages' own ways from a class to an answer of it."""
    r = oai.chat.completions.parse(model="m", messages=ASK, seed=1, max_tokens=LIMIT, response_format=Product, extra_body=OFF)
    check("chat: parse", isinstance(r.choices[0].message.parsed, Product), r)
    with oai.chat.completions.stream(model="m", messages=ASK, seed=2, max_tokens=LIMIT, response_format=Product, extra_body=OFF) as s:
        r = s.get_final_completion()
    check("chat: parse a stream", isinstance(r.choices[0].message.parsed, Product), r)
    tool = openai.pydantic_function_tool(Product, name="sell")
    r = oai.chat.completions.parse(model="m", messages=ASK, seed=3, max_tokens=LIMIT, tools=[tool], tool_choice="required", extra_body=OFF)
    check("chat: parse calls", all(isinstance(c.function.parsed_arguments, Product) for c in r.choices[0].message.tool_calls), r)
    r = oai.responses.parse(model="m", input=ASK, max_output_tokens=LIMIT, text_format=Product, reasoning={"effort": "none"}, extra_body={"seed": 4})
    check("responses: parse", isinstance(r.output_parsed, Product), r)
    with oai.responses.stream(model="m", input=ASK, max_output_tokens=LIMIT, text_format=Product, reasoning={"effort": "none"}, extra_body={"seed": 5}) as s:
        r = s.get_final_response()
    check("responses: parse a stream", isinstance(r.output_parsed, Product), r)
    r = ant.messages.parse(model="m", messages=ASK, max_tokens=LIMIT, output_format=Product, extra_body={"seed": 6})
    check("messages: parse", isinstance(r.parsed_output, Product), r)
    with ant.messages.stream(model="m", messages=ASK, max_tokens=LIMIT, output_format=Product, extra_body={"seed": 7}) as s:
        r = s.get_final_message()
    check("messages: parse a stream", isinstance(r.parsed_output, Product), r)


# ---- calls ----
def valid_calls(name, result, only=None):
    text, _, calls, end = result
    check(f"{name}: calls", calls and end == "tool_calls" and not text.strip(), result)
    check(f"{name}: ids", len({c[0] for c in calls}) == len(calls) and all(c[0] for c in calls), calls)
    for c in calls:
        check(f"{name}: function", c[1] == only if only else c[1] in BY_NAME, c)
        fits(f"{name}: arguments", BY_NAME[c[1]], c[2], c)
    return calls


def forced():
    for ask in DIALECTS:
        for stream, kind in BOTH:
            for strict in (False, True):
                name = f"{ask.__name__}{kind}{' strict' if strict else ''}"
                tools = tools_of(ask, TOOLS, strict)
                for seed in SEEDS:
                    valid_calls(f"{name}: required", ask(stream, ASK, seed, tools=tools, **choice_of(ask, "required")))
                    valid_calls(f"{name}: named", ask(stream, ASK, seed, tools=tools, **choice_of(ask, "book", True)), "book")
                result = ask(stream, ASK, 4, think=True, tools=tools, **choice_of(ask, "required"))
                valid_calls(f"{name}: thinking", result)
                check(f"{name}: reasoning before calls", result[1], result)
            _, _, calls, end = ask(stream, TASK, 5, tools=tools_of(ask, TOOLS, False), tool_choice={"type": "none"} if ask is messages else "none")
            check(f"{ask.__name__}{kind}: none", not calls and end != "tool_calls", (calls, end))
            loose = [{"name": "count", "description": "Count", "parameters": UNSUPPORTED}]
            _, _, calls, end = ask(stream, ASK, 6, tools=tools_of(ask, loose, False), **choice_of(ask, "required"))
            check(f"{ask.__name__}{kind}: schemas without strict are no error", calls and calls[0][1] == "count", (calls, end))


def turn_of(ask, calls, results):
    """The messages that bring calls and their results back."""
    if ask is chat:
        return [{"role": "assistant", "content": None, "tool_calls": [{"id": c[0], "type": "function", "function": {"name": c[1], "arguments": c[2]}}
                                                                      for c in calls]}] + [
            {"role": "tool", "tool_call_id": i, "content": r} for i, r in results]
    if ask is responses:
        return [{"type": "function_call", "call_id": c[0], "name": c[1], "arguments": c[2]} for c in calls] + [
            {"type": "function_call_output", "call_id": i, "output": r} for i, r in results]
    return [{"role": "assistant", "content": [{"type": "tool_use", "id": c[0], "name": c[1], "input": json.loads(c[2])} for c in calls]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": i, "content": r} for i, r in results]}]


def parallel():
    """Several calls in one answer, their results in the other order; and one call where no more are wanted. The model ends a list of calls
    behind the first, so the token that ends it (where anything else may come) is made unlikely: calls follow until the budget ends them."""
    q = urllib.request.Request(url + "/tokenize", json.dumps({"content": "</"}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(q, timeout=60) as r:
        close = json.load(r)["tokens"]
    check("parallel: one token", len(close) == 1, close)
    dice = [TOOLS[0]]
    for ask in DIALECTS:
        for stream, kind in BOTH:
            for strict in (False, True):
                name = f"{ask.__name__}{kind}{' strict' if strict else ''}"
                tools = tools_of(ask, dice, strict)
                more = {"extra_body": {"seed": 1, "logit_bias": {str(close[0]): -100}} | (OFF if ask is chat else {})}
                several = valid_calls(f"{name}: parallel", ask(stream, TASK, 1, tools=tools, **choice_of(ask, "required"), **more), "roll_dice")
                check(f"{name}: several calls", len(several) > 1, several)
                one = valid_calls(f"{name}: not parallel", ask(stream, TASK, 1, tools=tools, **choice_of(ask, "required", True), **more), "roll_dice")
                check(f"{name}: one call", len(one) == 1, one)
                back = [(c[0], str(7 * i)) for i, c in enumerate(several)][::-1]
                text, _, calls, end = ask(stream, TASK + turn_of(ask, several, back), 1, tools=tools)
                check(f"{name}: results of several calls", end == ("tool_calls" if calls else "stop") and (text or calls), (text, calls, end))


# ---- what is refused, in the shape that the packages read ----
def refusals():
    bad = [{"name": "count", "description": "Count", "parameters": UNSUPPORTED}]
    for ask, kind in ((chat, openai.BadRequestError), (responses, openai.BadRequestError), (messages, anthropic.BadRequestError)):
        params = {chat: "response_format", responses: "text.format", messages: "output_config.format"}
        for stream, how in BOTH:
            name = ask.__name__ + how
            for what, param, kw in (("format", params[ask], form_of(ask, UNSUPPORTED)), ("strict tool", "tools", {"tools": tools_of(ask, bad, True)})):
                e = refused(f"{name}: {what} refused", kind, lambda: ask(stream, ASK, 1, **kw), "uniqueItems", POINTER)
                if ask is messages:
                    check(f"{name}: {what}, shape", e.body["type"] == "error" and e.body["error"]["type"] == "invalid_request_error", e.body)
                    check(f"{name}: {what}, names it", ("tool 'count'" if param == "tools" else param) in e.message, e)
                else:
                    check(f"{name}: {what}, shape", e.type == "invalid_request_error" and set(e.body) >= {"message", "type", "param", "code"}, e.body)
                    check(f"{name}: {what}, names the field", e.param == param, e)
            refused(f"{name}: unknown function", kind, lambda: ask(stream, ASK, 1, tools=tools_of(ask, TOOLS, False), **choice_of(ask, "nobody")),
                    "nobody")
            refused(f"{name}: no tools", kind, lambda: ask(stream, ASK, 1, **choice_of(ask, "required")), "tools")
            nothing = {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 2}}, "required": ["a"]}
            refused(f"{name}: nothing fits", kind, lambda: ask(stream, ASK, 1, **form_of(ask, nothing)))
    e = refused("completions: format refused", openai.BadRequestError, lambda: oai.completions.create(
        model="m", prompt="x", max_tokens=9, extra_body=form_of(chat, UNSUPPORTED)), "uniqueItems", POINTER)
    check("completions: names the field", e.param == "response_format", e)
    e = refused("chat: allowed_tools", openai.BadRequestError, lambda: chat(False, ASK, 1, tools=tools_of(chat, TOOLS, False), tool_choice={
        "type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}))
    check("chat: allowed_tools names the field", e.param == "tool_choice", e)


# ---- clients that leave ----
def gauges():
    with urllib.request.urlopen(url + "/metrics", timeout=60) as r:
        lines = [line.split() for line in r.read().decode().splitlines() if not line.startswith("#")]
    return {k.removeprefix("affinity_"): float(v) for k, v in lines}


def until(name, ok):
    """Asks the server until it says so; a minute is far beyond what it may take."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        g = gauges()
        if ok(g):
            return g
    sys.exit(f"FAILED: {name}: {gauges()}")


def idle(name, before, left):
    until(name, lambda g: not g["requests_running"] and not g["requests_queued"] and g["choices_cancelled_total"] == before["choices_cancelled_total"] + left)
    with urllib.request.urlopen(url + "/slots", timeout=60) as r:
        slots = json.load(r)
    check(name, slots and not any(s["is_processing"] for s in slots), slots)


def leaving():
    endless = {"ignore_eos": True, "seed": 1}
    forever = form_of(chat, {"type": "array", "items": {"type": "boolean"}, "minItems": 3000})
    starts = {
        "chat": lambda: oai.chat.completions.create(model="m", messages=ASK, stream=True, extra_body=OFF | endless),
        "chat with a format": lambda: oai.chat.completions.create(model="m", messages=ASK, stream=True, extra_body=OFF, **forever),
        "completions": lambda: oai.completions.create(model="m", prompt="x", max_tokens=8000, stream=True, extra_body=endless),
        "responses": lambda: oai.responses.create(model="m", input=ASK, stream=True, extra_body=endless),
        "messages": lambda: ant.messages.create(model="m", messages=ASK, max_tokens=8000, stream=True, extra_body=endless),
    }
    for name, start in starts.items():
        before = gauges()
        with start() as s:
            next(iter(s))
            until(f"{name}: runs", lambda g: g["requests_running"] == 1)
        idle(f"{name}: left", before, 1)
    before = gauges()
    streams = [starts[name]() for name in ("chat", "responses", "messages", "completions", "chat with a format", "chat", "messages")]
    until("more than slots: wait", lambda g: g["requests_running"] + g["requests_queued"] == len(streams) and g["requests_queued"] > 0)
    for s in streams[::-1]:
        s.close()
    idle("more than slots: left", before, len(streams))
    asyncio.run(cancelled())
    r = oai.chat.completions.create(model="m", messages=ASK, temperature=0, max_tokens=8, extra_body=OFF)
    check("answers again", r.choices[0].message.content, r)


async def cancelled():
    """Tasks that wait for whole answers and are cancelled."""
    before = gauges()
    async with openai.AsyncOpenAI(base_url=url + "/v1", api_key="none", max_retries=0) as o, anthropic.AsyncAnthropic(
            base_url=url, api_key="none", max_retries=0) as a:
        endless = {"ignore_eos": True}
        tasks = [asyncio.create_task(t) for t in (
            o.chat.completions.create(model="m", messages=ASK, extra_body=OFF | endless),
            o.responses.create(model="m", input=ASK, extra_body=endless),
            a.messages.create(model="m", messages=ASK, max_tokens=8000, extra_body=endless, timeout=600))]
        while (await asyncio.to_thread(gauges))["requests_running"] < len(tasks):
            if any(t.done() for t in tasks):
                sys.exit(f"FAILED: tasks: ended before they could be cancelled: {tasks}")
        for t in tasks:
            t.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        check("tasks: cancelled", all(isinstance(r, asyncio.CancelledError) for r in results), results)
        await asyncio.to_thread(idle, "tasks: left", before, len(tasks))


print(f"openai {openai.__version__}, anthropic {anthropic.__version__}")
for part in (formats, helpers, forced, parallel, refusals, leaving):
    done = passed
    part()
    print(f"{part.__name__}: {passed - done} checks passed", flush=True)
