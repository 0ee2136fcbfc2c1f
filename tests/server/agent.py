"""An agent's loop through the official packages: 50 turns of one conversation, in each dialect, against a server with a prefix
cache on models/tiny-v4. Arguments: BASE_URL TURNS. Every turn asks for a tool and is forced to call one; the call's result and the next
question come back. Each turn but the first must find in the cache all that was run before it."""
import json
import sys

import anthropic
import openai

url, turns = sys.argv[1], int(sys.argv[2])
oai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
ant = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
SYSTEM = "You are a helpful assistant."
TOOLS = [{"name": "roll_dice", "description": "Roll dice", "parameters": {"type": "object", "properties": {
    "faces": {"type": "integer"}, "count": {"type": "integer"}}, "required": ["faces", "count"]}},
    {"name": "add_numbers", "description": "Add numbers", "parameters": {"type": "object", "properties": {
        "numbers": {"type": "array", "items": {"type": "integer"}}}, "required": ["numbers"]}}]
LIMIT = 60


def question(i):
    return f"Throw a {4 + i % 17} sided dice {1 + i % 6} times." if i % 2 else f"Use the tool to add {i + 3} and {2 * i + 1}."


def result(i):
    return str(i * 7 % 23)


class Loop:
    """One conversation: what is asked, and what it showed."""
    all = []

    def __init__(self, name):
        self.name, self.ran, self.calls, self.exact, self.misses, self.ids = name, 0, 0, 0, [], set()
        self.asks = [question(i + 1000 * len(Loop.all)) for i in range(turns + 1)]  # of each loop other ones: nothing is known at first
        Loop.all.append(self)

    def turn(self, i, prompt, cached, completion, whole, ids):
        """whole: the answer ended by itself, so that all of it comes back."""
        want = self.ran
        if i and cached < want:
            self.misses.append((i, cached, want))
        if i and cached == want:
            self.exact += 1
        if not ids:
            sys.exit(f"FAILED: {self.name}: turn {i} has no call")
        self.calls += len(ids)
        for one in ids:
            if one in self.ids:
                sys.exit(f"FAILED: {self.name}: id {one} came twice")
            self.ids.add(one)
        # the last token of an answer is not run; one that was cut counts up to where its prompt was run
        self.ran = prompt + completion - 1 if whole else prompt - 1

    def report(self):
        if self.misses:
            sys.exit(f"FAILED: {self.name}: turns that ran again what was known (turn, cached, known): {self.misses}")
        print(f"{self.name}: {turns} turns, {self.calls} calls; {self.exact} of {turns - 1} found exactly what was run before, "
              f"the rest more; {self.ran} tokens at the end")


def whole(**kw):
    r = oai.chat.completions.create(**kw)
    m = r.choices[0].message
    return m.content, [(c.id, c.function.name, c.function.arguments) for c in m.tool_calls or []], r.choices[0].finish_reason, r.usage


def gather(**kw):
    """A stream put together, as agents do. A call that the token limit cut off is left out, as in a whole answer."""
    text, calls, finish, usage = "", {}, None, None
    for c in oai.chat.completions.create(stream=True, stream_options={"include_usage": True}, **kw):
        usage = c.usage or usage
        if not c.choices:
            continue
        d, finish = c.choices[0].delta, c.choices[0].finish_reason or finish
        text += d.content or ""
        for t in d.tool_calls or []:
            call = calls.setdefault(t.index, ["", "", ""])
            call[0] += t.id or ""
            call[1] += t.function.name or ""
            call[2] += t.function.arguments or ""
    calls = [tuple(c) for c in calls.values()]
    if finish == "length" and calls:
        try:
            json.loads(calls[-1][2])
        except ValueError:
            calls.pop()
    return text or None, calls, finish, usage


def chat(stream):
    loop = Loop("chat, stream" if stream else "chat")
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": loop.asks[0]}]
    tools = [{"type": "function", "function": t} for t in TOOLS]
    for i in range(turns):
        kw = dict(model="m", messages=messages, tools=tools, tool_choice="required", temperature=0, max_tokens=LIMIT,
                  extra_body={"thinking": {"type": "disabled"}})
        text, calls, finish, u = gather(**kw) if stream else whole(**kw)
        loop.turn(i, u.prompt_tokens, u.prompt_tokens_details.cached_tokens, u.completion_tokens, finish != "length", [c[0] for c in calls])
        # as clients do: read the arguments and write them again in a spelling of their own
        again = [{"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(
            json.loads(args), separators=(",", ":"), sort_keys=True)}} for id_, name, args in calls]
        messages.append({"role": "assistant", "content": text} | ({"tool_calls": again} if again else {}))
        messages += [{"role": "tool", "tool_call_id": c[0], "content": result(i)} for c in calls]
        messages.append({"role": "user", "content": loop.asks[i + 1]})
    loop.report()


def claude():
    loop = Loop("messages")
    messages = [{"role": "user", "content": loop.asks[0]}]
    tools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in TOOLS]
    for i in range(turns):
        with ant.messages.stream(model="m", system=SYSTEM, messages=messages, tools=tools, tool_choice={"type": "any"}, max_tokens=LIMIT,
                                 extra_body={"temperature": 0}) as s:
            r = s.get_final_message()
        u = r.usage
        calls = [b for b in r.content if b.type == "tool_use"]
        loop.turn(i, u.input_tokens + u.cache_read_input_tokens, u.cache_read_input_tokens, u.output_tokens, r.stop_reason != "max_tokens",
                  [b.id for b in calls])
        messages.append({"role": "assistant", "content": [b.model_dump(include={"type", "text", "id", "name", "input"}, exclude_none=True)
                                                          for b in r.content]})
        messages.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": b.id, "content": result(i)} for b in calls] +
                         [{"type": "text", "text": loop.asks[i + 1]}]})
    loop.report()


def codex():
    loop = Loop("responses")
    history = [{"role": "user", "content": loop.asks[0]}]
    tools = [{"type": "function", "strict": False} | t for t in TOOLS]
    for i in range(turns):
        with oai.responses.stream(model="m", instructions=SYSTEM, input=history, tools=tools, temperature=0, max_output_tokens=LIMIT,
                                  reasoning={"effort": "none"}, parallel_tool_calls=False, store=False,
                                  tool_choice="required") as s:
            r = s.get_final_response()
        u = r.usage
        calls = [o for o in r.output if o.type == "function_call"]
        loop.turn(i, u.input_tokens, u.input_tokens_details.cached_tokens, u.output_tokens, r.status == "completed", [c.call_id for c in calls])
        history += [o.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for o in r.output]
        history += [{"type": "function_call_output", "call_id": c.call_id, "output": result(i)} for c in calls]
        history.append({"role": "user", "content": loop.asks[i + 1]})
    loop.report()


print(f"openai {openai.__version__}, anthropic {anthropic.__version__}; calls forced")
chat(False)
chat(True)
claude()
codex()
