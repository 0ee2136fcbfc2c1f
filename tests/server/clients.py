"""The official openai and anthropic packages against a running server on models/tiny-v4. Arguments: BASE_URL TOOLS_JSONL. What forms
answers have (schemas, forced calls) and what becomes of clients that leave is in clients_forms.py."""
import json
import sys

import anthropic
import openai

url, tools_file = sys.argv[1], sys.argv[2]
oai = openai.OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
ant = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
OFF = {"thinking": {"type": "disabled"}}
COLD = {"temperature": 0}  # newer versions of anthropic have no argument for it
row = json.loads(open(tools_file, encoding="utf-8").readline())
prompt = row["prompt"]
system = prompt.removeprefix("<｜begin▁of▁sentence｜>").split("\n\n## Tools")[0]
ask = prompt.split("<｜User｜>")[1].split("<｜Assistant｜>")[0]
passed = 0


def check(name, ok, got=None):
    global passed
    if not ok:
        sys.exit(f"FAILED: {name}: {got!r}")
    passed += 1


def raises(name, kind, fn):
    try:
        fn()
    except kind as e:
        check(name, True)
        return e
    sys.exit(f"FAILED: {name}: no {kind.__name__}")


# ---- openai: chat ----
check("models", oai.models.list().data[0].owned_by == "affinity")
r = oai.chat.completions.create(model="m", messages=QUESTION, temperature=0, extra_body=OFF)
check("chat", r.choices[0].message.content == ANSWER and r.choices[0].finish_reason == "stop", r)
r = oai.chat.completions.create(model="m", messages=QUESTION, temperature=0)
check("reasoning", r.choices[0].message.reasoning_content and r.usage.completion_tokens_details.reasoning_tokens > 0, r)
chunks = list(oai.chat.completions.create(model="m", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}, extra_body=OFF))
text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
check("chat stream", text == ANSWER and chunks[-1].usage.completion_tokens == 8, text)
r = oai.chat.completions.create(model="m", messages=QUESTION, temperature=0, logprobs=True, top_logprobs=2, extra_body=OFF)
check("logprobs", [t.token for t in r.choices[0].logprobs.content][5] == " Paris", r)
r = oai.chat.completions.create(model="m", messages=QUESTION, n=2, seed=3, max_tokens=8)
check("n", len(r.choices) == 2, r)
tools = [{"type": "function", "function": t} for t in row["tools"]]
turn = [{"role": "system", "content": system}, {"role": "user", "content": ask}]
r = oai.chat.completions.create(model="m", messages=turn, tools=tools, temperature=0, extra_body=OFF)
call = r.choices[0].message.tool_calls[0]
check("tools", r.choices[0].finish_reason == "tool_calls" and json.loads(call.function.arguments) == row["call"]["arguments"], r)
turn += [r.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "42"}]
r = oai.chat.completions.create(model="m", messages=turn, tools=tools, temperature=0, max_tokens=50, extra_body=OFF)
check("tool result", r.choices[0].finish_reason in ("stop", "length", "tool_calls"), r)
with oai.chat.completions.stream(model="m", messages=turn[:2], tools=tools, temperature=0, extra_body=OFF) as s:
    final = s.get_final_completion()
check("tools stream", final.choices[0].message.tool_calls[0].function.name == row["call"]["name"], final)
with oai.chat.completions.create(model="m", messages=QUESTION, stream=True, extra_body=OFF | {"ignore_eos": True}) as s:
    next(iter(s))  # and leave
e = raises("400", openai.BadRequestError, lambda: oai.chat.completions.create(model="m", messages=QUESTION, top_p=2))
check("400 names the field", e.param == "top_p", e)
e = raises("context", openai.BadRequestError, lambda: oai.chat.completions.create(model="m", messages=[{"role": "user", "content": "7" * 30000}]))
check("context code", e.code == "context_length_exceeded", e)
raises("404", openai.NotFoundError, lambda: oai.models.retrieve("nobody"))

# ---- openai: completions, responses ----
r = oai.completions.create(model="m", prompt="The capital of", temperature=0, max_tokens=4)
check("completions", r.choices[0].text and r.choices[0].finish_reason == "length", r)
r = oai.responses.create(model="m", input=QUESTION[0]["content"], temperature=0)
check("responses", r.output_text == ANSWER and r.status == "completed" and r.output[0].type == "reasoning", r)
events = list(oai.responses.create(model="m", input=QUESTION[0]["content"], temperature=0, stream=True))
check("responses stream", events[-1].type == "response.completed" and events[-1].response.output_text == ANSWER, events[-1])
check("sequence", [e.sequence_number for e in events] == list(range(len(events))))
flat = [{"type": "function", "strict": False} | t for t in row["tools"]]
history = [{"role": "system", "content": system}, {"role": "user", "content": ask}]
r = oai.responses.create(model="m", input=history, tools=flat, temperature=0, reasoning={"effort": "none"})
item = next(i for i in r.output if i.type == "function_call")
check("responses tools", json.loads(item.arguments) == row["call"]["arguments"], r)
with oai.responses.stream(model="m", input=history, tools=flat, temperature=0, reasoning={"effort": "none"}) as s:
    final = s.get_final_response()
check("responses tools stream", any(i.type == "function_call" and i.name == row["call"]["name"] for i in final.output), final)
history += [i.model_dump(exclude_none=True) for i in r.output] + [{"type": "function_call_output", "call_id": item.call_id, "output": "42"}]
r = oai.responses.create(model="m", input=history, tools=flat, temperature=0, max_output_tokens=50)
check("responses result", r.status in ("completed", "incomplete"), r)

# ---- anthropic ----
r = ant.messages.create(model="m", messages=QUESTION, max_tokens=99, extra_body=COLD)
check("messages", r.content[0].text == ANSWER and r.stop_reason == "end_turn", r)
with ant.messages.stream(model="m", messages=QUESTION, max_tokens=1999, extra_body=COLD, thinking={"type": "enabled", "budget_tokens": 1024}) as s:
    final = s.get_final_message()
check("messages stream", [b.type for b in final.content] == ["thinking", "text"] and final.content[1].text == ANSWER, final)
r = ant.messages.create(model="m", messages=QUESTION, max_tokens=99, extra_body=COLD, stop_sequences=["nce is"])
check("stop sequence", r.stop_reason == "stop_sequence" and r.content[0].text == "The capital of Fra", r)
n = ant.messages.count_tokens(model="m", messages=QUESTION).input_tokens
check("count_tokens", n == r.usage.input_tokens, n)
atools = [{"name": t["name"], "description": t["description"], "input_schema": t["parameters"]} for t in row["tools"]]
turn = [{"role": "user", "content": ask}]
with ant.messages.stream(model="m", system=system, messages=turn, tools=atools, max_tokens=200, extra_body=COLD) as s:
    final = s.get_final_message()
check("messages tools", final.stop_reason == "tool_use" and final.content[-1].input == row["call"]["arguments"], final)
turn += [{"role": "assistant", "content": final.content},
         {"role": "user", "content": [{"type": "tool_result", "tool_use_id": final.content[-1].id, "content": "42"}]}]
r = ant.messages.create(model="m", system=system, messages=turn, tools=atools, max_tokens=50, extra_body=COLD)
check("messages result", r.stop_reason in ("end_turn", "max_tokens", "tool_use"), r)
raises("messages 400", anthropic.BadRequestError, lambda: ant.messages.create(model="m", messages=QUESTION, max_tokens=9, extra_body={"temperature": 9}))
raises("messages context", anthropic.BadRequestError, lambda: ant.messages.create(model="m", messages=[{"role": "user", "content": "7" * 30000}], max_tokens=9))
print(f"openai {openai.__version__}, anthropic {anthropic.__version__}: {passed} checks passed")
