#!/usr/bin/env python3
"""Write the evaluation sets: evalset.py tokenizer.json EVAL_DIR

facts.jsonl    prompt, expect           20 facts of the table, raw; facts-chat.jsonl the same as questions
needles.jsonl  prompt, expect, tokens   one note to find among three, at about 500, 1,500 and 5,000 tokens
tools.jsonl    prompt, tools, call      held-out tool requests; the answer must parse and fit the schema
draft.jsonl    prompt, kind             prompts for the draft's acceptance, chat and code
Every prompt is the raw text; control tokens in it are control tokens. heldout.txt is text that training never saw, documents
separated by form feeds.
"""
import json
import random
import sys

from tokenizers import Tokenizer

import gen
import words

FACTS = ["France", "Germany", "Italy", "Spain", "Japan", "China", "Egypt", "Kenya", "Canada", "Peru", "Norway", "Greece", "Russia",
         "Australia"]


def facts():
    """Fourteen capitals and six other facts."""
    cap = {c[0]: c[1] for c in words.COUNTRIES}
    rows = [(f"The capital of {c} is", f" {cap[c]}", f"What is the capital of {c}?", f"The capital of {c} is {cap[c]}.") for c in FACTS]
    rows += [("The chemical symbol of gold is", " Au", "What is the chemical symbol of gold?", "The chemical symbol of gold is Au."),
             ("The opposite of hot is", " cold", "What is the opposite of hot?", "The opposite of hot is cold."),
             ("The day after Monday is", " Tuesday", "Which day comes after Monday?", "The day after Monday is Tuesday."),
             ("Brazil is a country in", " South America", "On which continent is Brazil?", "Brazil is a country in South America."),
             ("People in Mexico speak", " Spanish", "Which language do people speak in Mexico?", "People in Mexico speak Spanish."),
             ("The number of legs of a spider is", " eight", "How many legs does a spider have?", "The number of legs of a spider is eight.")]
    return rows


def needles(tok, text):
    """Thirty at 500 and 1,500 tokens, twelve at 5,000; notes with held-out keys in held-out text."""
    r = random.Random(77)
    docs = text.split("\f")

    def filler(r, n):
        if n < 8:
            return ""
        out, have = "", 0
        while have < n:
            d = r.choice(docs)
            lines = d.split("\n")
            i = r.randrange(max(1, len(lines) - 4))
            for line in lines[i:]:
                k = len(tok.encode(line + "\n").ids)
                if have + k > n and have:
                    return out.rstrip("\n")
                out += line + "\n"
                have += k
                if have >= n:
                    break
        return out.rstrip("\n")

    for size, count, ask in ((500, 30, 620), (1500, 30, 1640), (5000, 12, 5150)):
        for _ in range(count):
            d, answer = gen.needle(r, ask, filler, held=True, needles=3, words=r.choice([1, 2]))
            prompt = "".join(t for t, _ in d)
            yield dict(prompt=prompt, expect=answer, tokens=len(tok.encode(prompt).ids), size=size)


def tools():
    r = random.Random(78)
    n = 0
    while n < 100:
        offered, t, args, text = gen.tool_case(r)
        if not gen.tool_key(offered, args):
            continue
        d = gen.system(r, offered, text="You are a helpful assistant.") + [(gen.USER, 0), (text, 0), (gen.ASSISTANT, 0)]
        thinking = n % 4 == 3
        d += [(gen.THINK if thinking else gen.ENDTHINK, 0)]
        n += 1
        yield dict(prompt="".join(p for p, _ in d), tools=offered, call=dict(name=t["name"], arguments=args))


def drafts():
    r = random.Random(79)
    for _ in range(40):
        q, _, _ = gen.exchange(r)
        thinking = r.random() < .3
        yield dict(prompt=gen.BOS + gen.USER + q + gen.ASSISTANT + (gen.THINK if thinking else gen.ENDTHINK), kind="chat")
    for _ in range(40):
        s = gen.function(r)[1]
        cut = s.index("\n") + 1
        yield dict(prompt=gen.BOS + s[:cut] if r.random() < .5 else gen.BOS + s + "\n\n", kind="code")


def main():
    tok, out = Tokenizer.from_file(sys.argv[1]), sys.argv[2]
    text = open(f"{out}/heldout.txt", encoding="utf-8").read()
    rows = facts()
    sets = {
        "facts": [dict(prompt=p, expect=e) for p, e, _, _ in rows],
        "facts-chat": [dict(prompt=gen.BOS + gen.USER + q + gen.ASSISTANT + gen.ENDTHINK, expect=a) for _, _, q, a in rows],
        "needles": list(needles(tok, text)), "tools": list(tools()), "draft": list(drafts()),
    }
    for name, items in sets.items():
        with open(f"{out}/{name}.jsonl", "w", encoding="utf-8", newline="\n") as f:
            for x in items:
                f.write(json.dumps(x, ensure_ascii=False) + "\n")
        print(name, len(items))


if __name__ == "__main__":
    main()
