"""Answers held to 200 schemas of varied shape, and calls to a quarter as many tools: every reply that ends in `stop` (calls: `tool_calls`)
validates by the jsonschema package, and at least 95 % end so.

    schemas.py URL [n]             runs n schemas (200) against a server, prints a table
    schemas.py --scramble IN OUT   copies a checkpoint folder, its output matrix replaced by random numbers
"""
import concurrent.futures
import json
import os
import random
import shutil
import struct
import sys
import urllib.request

import_error = None
try:
    import jsonschema
except ImportError as e:  # --scramble does without
    import_error = e

WORDS = ["name", "id", "title", "items", "price", "count", "tags", "address", "city", "état", "部屋", "is_ok", "a/b", "x y", "notes", "kind"]
FORMATS = ["date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "uri", "duration"]
PATTERNS = ["^[A-Z]{3}-\\d{4}$", "^(\\+\\d{1,3} )?\\d{6,9}$", "^[a-f0-9]{8}$", "^\\w+@\\w+\\.(com|org)$", "^[^\\s,]{1,12}$", "foo|bar", "^v\\d+(\\.\\d+){0,2}$", "^[\\u4e00-\\u9fff]{2,4}$"]


def scalar(r):
    k = r.randrange(14)
    if k == 0:
        return {"type": "boolean"}
    if k == 1:
        return {"type": "null"}
    if k == 2:
        lo = r.randrange(-1000, 1000)
        return {"type": "integer", "minimum": lo, "maximum": lo + r.choice([0, 3, 50, 10000])}
    if k == 3:
        return {"type": "integer", r.choice(["exclusiveMinimum", "minimum"]): r.choice([0, 1, 99, -7, 2**63, 10**20])}
    if k == 4:
        lo = r.choice([-1.5, 0, 0.25, 99.9, 1e-3])
        return {"type": "number", "minimum": lo, "exclusiveMaximum": lo + r.choice([0.5, 1, 1000])}
    if k == 5:
        return {"type": "number"}
    if k == 6:
        lo = r.randrange(0, 8)
        return {"type": "string", "minLength": lo, "maxLength": lo + r.randrange(0, 30)}
    if k == 7:
        return {"type": "string", "pattern": r.choice(PATTERNS)}
    if k == 8:
        return {"type": "string", "format": r.choice(FORMATS)}
    if k == 9:
        return {"enum": r.sample(["red", "green", "grün", 'quo"te', "new\nline", 1, 2.5, None, True, 2**64, ["a", 1], {"k": "v"}], r.randrange(1, 6))}
    if k == 10:
        return {"const": r.choice(["fixed", 42, None, 3.25, {"a": [1, {"b": "ü"}]}])}
    if k == 11:
        return {"type": r.sample(["string", "integer", "null", "boolean", "number"], 2)}
    if k == 12:
        return {"type": "string", "minLength": 1, "maxLength": 12, "pattern": r.choice(["^[a-z ]+$", "^\\S+$", "^(ab)*c?$"])}
    return {"type": "string"}


def schema(r, depth):
    k = r.randrange(10) if depth > 0 else 0
    if k < 4:
        return scalar(r)
    if k < 7:
        names = r.sample(WORDS, r.randrange(1, 6))
        s = {"type": "object", "properties": {n: schema(r, depth - 1) for n in names}, "required": r.sample(names, r.randrange(0, len(names) + 1))}
        extra = r.randrange(4)
        if extra < 2:
            s["additionalProperties"] = False
        elif extra == 2:
            s["additionalProperties"] = scalar(r)
        if r.random() < 0.2:
            s["description"] = "A thing."
        return s
    if k < 8:
        s = {"type": "array", "items": schema(r, depth - 1)}
        if r.random() < 0.7:
            s["minItems"] = r.randrange(0, 3)
            s["maxItems"] = s["minItems"] + r.randrange(0, 4)
        if r.random() < 0.2:
            s["prefixItems"] = [scalar(r), scalar(r)]
        return s
    if k < 9:
        return {"anyOf": [schema(r, depth - 1) for _ in range(r.randrange(2, 4))]}
    kinds = r.sample(["cat", "dog", "fish"], r.randrange(2, 4))
    return {"oneOf": [{"type": "object", "properties": {"kind": {"const": n}, "v": schema(r, depth - 1)}, "required": ["kind", "v"]} for n in kinds]}


def fixed():
    node = {"type": "object", "properties": {"value": {"type": "integer"}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 3}}, "required": ["value", "children"], "additionalProperties": False}
    step = {"properties": {"explanation": {"title": "Explanation", "type": "string"}, "output": {"title": "Output", "type": "string"}}, "required": ["explanation", "output"], "title": "Step", "type": "object", "additionalProperties": False}
    return [
        True,
        {},
        {"type": "object"},
        {"type": "array"},
        {"$defs": {"node": node}, "$ref": "#/$defs/node"},
        {"$defs": {"node": node}, "type": "object", "properties": {"root": {"$ref": "#/$defs/node"}}, "required": ["root"]},
        {"$defs": {"Step": step}, "properties": {"steps": {"items": {"$ref": "#/$defs/Step"}, "title": "Steps", "type": "array"}, "final_answer": {"title": "Final Answer", "type": "string"}}, "required": ["steps", "final_answer"], "title": "Reasoning", "type": "object", "additionalProperties": False},
        {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object", "properties": {"q": {"anyOf": [{"type": "string"}, {"type": "null"}], "default": None}, "n": {"type": "integer", "exclusiveMinimum": 0, "default": 10}}, "additionalProperties": False},
        {"definitions": {"pos": {"type": "integer", "minimum": 1}}, "type": "array", "items": {"$ref": "#/definitions/pos"}, "minItems": 2, "maxItems": 5},
        {"allOf": [{"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"maxLength": 4}}, "required": ["b"]}]},
        {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "string"}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}], "additionalProperties": False},
        {"type": "object", "properties": {f"p{i}": {"type": ["integer", "null"]} for i in range(60)}, "additionalProperties": False},
        {"type": "object", "properties": {f"p{i}": {"type": "boolean"} for i in range(12)}, "required": [f"p{i}" for i in range(12)], "additionalProperties": False},
        {"type": "array", "prefixItems": [{"type": "number"}, {"type": "string", "maxLength": 10}, {"enum": ["NW", "SE"]}], "items": False, "minItems": 3},
        {"type": "string", "enum": ["a", "ab", "abc", "b"]},
        {"type": "integer", "minimum": 18446744073709551615, "maximum": 18446744073709551620},
        {"type": "number", "minimum": 0, "maximum": 1},
        {"type": "object", "required": ["undeclared"], "additionalProperties": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}, "maxItems": 2}, "minItems": 1},
        {"type": "object", "properties": {"a": {"$ref": "#/properties/b"}, "b": {"type": "string", "format": "date"}}, "required": ["a", "b"], "additionalProperties": False},
    ]


def schemas(n):
    r = random.Random(2026)
    out = fixed()[:n]
    while len(out) < n:
        s = schema(r, 3)
        try:
            jsonschema.Draft202012Validator.check_schema(s)
        except jsonschema.SchemaError:
            continue
        out.append(s)
    return out


def post(url, body):
    q = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(q, timeout=600) as a:
            return json.load(a)
    except urllib.error.HTTPError as e:
        return json.load(e)


def check(s, text):
    try:
        value = json.loads(text)
    except ValueError as e:
        return f"no JSON: {e}"
    errors = list(jsonschema.Draft202012Validator(s, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER).iter_errors(value))
    return errors[0].message[:200] if errors else None


def ask(url, i, s, calls):
    """What became of one request: stop, length, refused; and what is wrong with it."""
    r = random.Random(i)
    body = {"messages": [{"role": "user", "content": "Give me an example."}], "seed": i, "max_tokens": r.randrange(160, 280), "thinking": {"type": "enabled" if i % 8 == 0 else "disabled"}, "temperature": r.choice([0.7, 1, 1.3])}
    if calls:
        body["tools"] = [{"type": "function", "function": {"name": "use", "strict": True, "parameters": {"type": "object", "properties": {"arg": s}, "required": ["arg"], "additionalProperties": False, **({"$defs": s["$defs"]} if isinstance(s, dict) and "$defs" in s else {})}}}]
        body["tool_choice"] = "required"
        body["parallel_tool_calls"] = False
    else:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": s}}
    a = post(url, body)
    if "error" in a:
        return "refused", a["error"]["message"]
    c = a["choices"][0]
    if not calls:
        return c["finish_reason"], check(s, c["message"]["content"]) if c["finish_reason"] == "stop" else None
    if c["finish_reason"] != "tool_calls":
        return c["finish_reason"], None if c["finish_reason"] == "length" else "no call"
    f = body["tools"][0]["function"]
    return "stop", check(f["parameters"], c["message"]["tool_calls"][0]["function"]["arguments"])


def run(url, n):
    failed = False
    for calls in (False, True):
        # calls: every fourth; references of a whole schema go astray when it becomes a part of another
        work = [(i, s) for i, s in enumerate(schemas(n)) if not calls or (i % 4 == 1 and "#/properties" not in json.dumps(s) and "#/definitions" not in json.dumps(s))]
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            results = list(pool.map(lambda w: ask(url, w[0], w[1], calls), work))
        ends = {k: sum(r[0] == k for r in results) for k in ("stop", "length", "refused")}
        wrong = [(w, r) for w, r in zip(work, results) if r[1]]
        print(f"{'calls' if calls else 'answers'}: {len(work)} schemas; ended in stop {ends['stop']} ({100 * ends['stop'] / len(work):.1f} %), length {ends['length']}, refused {ends['refused']}; of those in stop {sum(r[0] == 'stop' and not r[1] for r in results)} validate")
        for (i, s), (end, why) in wrong:
            print(f"  schema {i}: {end}: {why}\n    {json.dumps(s, ensure_ascii=False)[:300]}")
        failed |= bool(wrong) or ends["stop"] < 0.95 * len(work)
    return failed


def scramble(source, target):
    shutil.copytree(source, target)
    r = random.Random(1)
    found = 0
    for name in os.listdir(target):
        if not name.endswith(".safetensors"):
            continue
        path = os.path.join(target, name)
        with open(path, "r+b") as f:
            n = struct.unpack("<Q", f.read(8))[0]
            header = json.loads(f.read(n))
            t = header.get("head.weight") or header.get("lm_head.weight")
            if not t:
                continue
            begin, end = t["data_offsets"]
            size = {"BF16": 2, "F32": 4}[t["dtype"]]
            data = bytearray()
            for _ in range((end - begin) // size):
                data += struct.pack("<f", r.gauss(0, 0.3))[4 - size:]
            f.seek(8 + n + begin)
            f.write(data)
            found += 1
    if not found:
        sys.exit(f"{source}: expected an output matrix, found none")


def main(argv):
    if len(argv) == 4 and argv[1] == "--scramble":
        return scramble(argv[2], argv[3])
    if import_error:
        sys.exit(f"{import_error}: pip install jsonschema")
    return run(argv[1], int(argv[2]) if len(argv) > 2 else 200)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
