#!/usr/bin/env python3
"""Run the evaluation sets through the engine: replay.py AFFINITY MODEL TOKENIZER EVAL_DIR [set ...]

Sets: facts facts-chat needles tools. Prints one line a set; needs only Python and the `affinity` program.
"""
import json
import re
import subprocess
import sys
import time

D = "｜DSML｜"


def complete(program, model, tok, prompt, n):
    run = subprocess.run([program, "-m", model, "--tokenizer", tok, "--prompt-file", "-", "-n", str(n), "--no-echo"],
                         input=prompt.encode(), capture_output=True, check=True)
    return run.stdout.decode("utf-8", "replace")


def parse_call(text):
    """(name, arguments) of the first call in a completion, or None."""
    m = re.search(rf'<{D}tool_calls>\n<{D}invoke name="([^"]*)">\n(.*?)\n</{D}invoke>\n</{D}tool_calls>', text, re.S)
    if not m:
        return None
    args = {}
    rest = re.sub(rf'<{D}parameter name="([^"]*)" string="(true|false)">(.*?)</{D}parameter>',
                  lambda p: args.__setitem__(p[1], (p[2], p[3])) or "", m[2], flags=re.S)
    if rest.strip():
        return None
    try:
        return m[1], {k: v if s == "true" else json.loads(v) for k, (s, v) in args.items()}
    except ValueError:
        return None


def fits(tools, call):
    """Does a parsed call name an offered tool and satisfy its schema?"""
    kinds = dict(string=str, boolean=bool, array=list, integer=int)
    for t in tools if call else []:
        if t["name"] == call[0]:
            schema = t["parameters"]
            return (all(k in schema["properties"] and type(v) is kinds[schema["properties"][k]["type"]] for k, v in call[1].items())
                    and all(k in call[1] for k in schema["required"]))
    return False


def main():
    program, model, tok, where = sys.argv[1:5]
    for name in sys.argv[5:] or ("facts", "facts-chat", "needles", "tools"):
        items = [json.loads(s) for s in open(f"{where}/{name}.jsonl", encoding="utf-8")]
        t0, score = time.time(), {}
        for x in items:
            text = complete(program, model, tok, x["prompt"], 110 if name == "tools" else 16)
            if name == "tools":
                call = parse_call(text)
                for k, ok in (("valid", fits(x["tools"], call)), ("exact", call == (x["call"]["name"], x["call"]["arguments"]))):
                    score.setdefault(k, []).append(ok)
            else:
                score.setdefault(str(x.get("size", "right")), []).append(text.startswith(x["expect"]))
        print(name, ", ".join(f"{k} {sum(v)}/{len(v)}" for k, v in score.items()), f"({time.time() - t0:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
