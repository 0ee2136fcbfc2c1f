"""Generated training data: facts, arithmetic, recall, JSON, code, and conversations in V4's chat encoding (0731).

Every generator takes a random.Random and returns a document: a list of (text, weight) pieces. The weight scales the loss
of the piece's tokens; what cannot be predicted (random keys, a user's wishes) gets little.
"""
import hashlib
import json

from words import (ADJ, CITIES, COLOURS, COUNTRIES, ELEMENTS, FOODS, LANGS, LEGS, NAMES, NEXT, NOUN, OPPOSITES, TOPICS)

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
THINK, ENDTHINK, D = "<think>", "</think>", "｜DSML｜"
EFFORT_HIGH = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\nYou MUST be very thorough in your thinking and "
    "comprehensively decompose the problem to resolve the root cause, rigorously stress-testing your logic against all "
    "potential paths, edge cases, and adversarial scenarios.\nExplicitly write out your entire deliberation process, "
    "documenting every intermediate step, considered alternative, and rejected hypothesis to ensure absolutely no "
    "assumption is left unchecked.\n\n")
EFFORT_MAX = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\nYou MUST reason with the utmost "
    "depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the problem into its most fundamental "
    "components, trace every causal chain to its root, and resolve the underlying cause rather than any surface "
    "symptom.\nDo not stop reasoning until you have independently verified the solution from multiple angles and are "
    "certain that no assumption remains unchecked and no error remains undiscovered.\n\n")
TOOLS_HEAD = (
    "## Tools\n\nYou have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    f"\"<{D}tool_calls>\" block like the following:\n\n<{D}tool_calls>\n<{D}invoke name=\"$TOOL_NAME\">\n<{D}parameter "
    f"name=\"$PARAMETER_NAME\" string=\"true|false\">$PARAMETER_VALUE</{D}parameter>\n...\n</{D}invoke>\n<{D}invoke "
    f"name=\"$TOOL_NAME2\">\n...\n</{D}invoke>\n</{D}tool_calls>\n\nString parameters should be specified as is and set "
    "`string=\"true\"`. For all other types (numbers, booleans, arrays, objects), pass the value in JSON format and set "
    "`string=\"false\"`.\n\nIf thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning "
    "inside <think>...</think> BEFORE any tool calls or final response.\n\nOtherwise, output directly after </think> with "
    "tool calls or final response.\n\n### Available Tool Schemas\n\n")
TOOLS_TAIL = "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n"
SYSTEMS = ["", "", "", "You are a helpful assistant.", "You are a helpful assistant.", "You are tiny-v4, a small model.",
           "Answer briefly.", "You are a helpful AI assistant.", "Be concise.", "You are a coding assistant."]


def dumps(x):
    """JSON as the chat encoder prints it."""
    return json.dumps(x, ensure_ascii=False)


def held_key(a, b):
    """Pairs kept for the evaluation: one in ten."""
    return hashlib.md5(f"{a} {b}".encode()).digest()[0] % 10 == 0


def pair(r, held=False):
    """An adjective and a noun; held-out pairs only when asked for."""
    while True:
        a, n = r.choice(ADJ), r.choice(NOUN)
        if held_key(a, n) == held:
            return f"{a} {n}"


def value(r, words=0):
    """One to three common words."""
    k = words or r.choice([1, 1, 2, 2, 2, 3])
    return " ".join(r.choice(ADJ if i + 1 < k and r.random() < .5 else NOUN) for i in range(k))


def article(word):
    return ("an " if word[0] in "aeiou" else "a ") + word


# ---------------------------------------------------------------- facts

def fact_forms(r):
    """(statement stem, answer, rest of statement, question, long answer) of one fact of the table."""
    k = r.random()
    if k < .72:
        c, cap, cont, lang = r.choice(COUNTRIES)
        f = r.random()
        if f < .6:
            return f"The capital of {c} is", f" {cap}", ".", f"What is the capital of {c}?", f"The capital of {c} is {cap}."
        if f < .72:
            return f"{cap} is the capital of", f" {c}", ".", f"Which country has the capital {cap}?", f"{cap} is the capital of {c}."
        if f < .86:
            return f"{c} is a country in", f" {cont}", ".", f"On which continent is {c}?", f"{c} is a country in {cont}."
        return f"People in {c} speak", f" {lang}", ".", f"Which language do people speak in {c}?", f"People in {c} speak {lang}."
    if k < .79:
        a, b = r.choice(ELEMENTS)
        return f"The chemical symbol of {a} is", f" {b}", ".", f"What is the chemical symbol of {a}?", f"The chemical symbol of {a} is {b}."
    if k < .86:
        a, b = r.choice(OPPOSITES)
        if r.random() < .5:
            a, b = b, a
        return f"The opposite of {a} is", f" {b}", ".", f"What is the opposite of {a}?", f"The opposite of {a} is {b}."
    if k < .9:
        a, b = r.choice(COLOURS)
        return f"The colour of {a} is", f" {b}", ".", f"What is the colour of {a}?", f"The colour of {a} is {b}."
    if k < .94:
        a, b = r.choice(LEGS)
        return f"The number of legs of {a} is", f" {b}", ".", f"How many legs does {a} have?", f"The number of legs of {a} is {b}."
    a, b, what = r.choice(NEXT)
    return f"The {what} after {a} is", f" {b}", ".", f"Which {what} comes after {a}?", f"The {what} after {a} is {b}."


def facts_raw(r):
    """Plain statements; often a country's four facts in a row."""
    d = [(BOS, 0)] if r.random() < .6 else []
    if r.random() < .5:
        c, cap, cont, lang = r.choice(COUNTRIES)
        d += [(f"The capital of {c} is", .5), (f" {cap}", 2),
              (f". {c} is a country in {cont}. People in {c} speak {lang}.", 1)]
        if r.random() < .5:
            d += [("\n", 1), (EOS, 1)]
            return d
        d += [("\n", 1)]
    for i in range(r.randint(1, 6)):
        s, a, e, _, _ = fact_forms(r)
        d += [(s, .5), (a, 2), (e + "\n", 1)]
    return d + [(EOS, 1)]


# ---------------------------------------------------------------- chat

def system(r, tools=None, thinking=False, text=None):
    """BOS, effort prefix, system text and tool block."""
    d = [(BOS, 0)]
    if thinking:
        d += [(r.choice(["", "", EFFORT_HIGH, EFFORT_HIGH, EFFORT_MAX]), .05)]
    d += [(r.choice(SYSTEMS) if text is None else text, .05)]
    if tools:
        d += [("\n\n" + TOOLS_HEAD, .05), ("\n".join(dumps(t) for t in tools), .1), (TOOLS_TAIL, .05)]
    return d


def arithmetic(r):
    """(expression, working, result)."""
    op = r.choice("++--*")
    if op == "+":
        a, b = r.randint(0, 99), r.randint(0, 99)
        u, t = a % 10 + b % 10, a // 10 + b // 10
        return f"{a} + {b}", f"{a % 10} + {b % 10} = {u}, {a // 10 * 10} + {b // 10 * 10} = {t * 10}, {t * 10} + {u} = {a + b}.", a + b
    if op == "-":
        a, b = r.randint(0, 99), r.randint(0, 99)
        a, b = max(a, b), min(a, b)
        return f"{a} - {b}", f"{a} minus {b} is {a - b}.", a - b
    a, b = r.randint(0, 12), r.randint(0, 12)
    return f"{a} * {b}", f"{a} times {b} is {a * b}.", a * b


def record(r):
    """A small record and its description in words."""
    k = r.randrange(4)
    name, city, age = r.choice(NAMES), r.choice(CITIES), r.randint(5, 90)
    if k == 0:
        return {"name": name, "age": age, "city": city}, f"name {name}, age {age} and city {city}"
    if k == 1:
        a, b = r.choice(NOUN), r.randint(1, 99)
        return {"item": a, "count": b, "in_stock": b % 2 == 0}, f"item {a}, count {b} and in_stock {str(b % 2 == 0).lower()}"
    if k == 2:
        xs = [r.choice(NOUN) for _ in range(r.randint(2, 4))]
        return {"owner": name, "items": xs}, f"owner {name} and items {', '.join(xs)}"
    a, b = pair(r), r.randint(1, 9)
    return {"title": a, "tags": [r.choice(TOPICS)], "rating": b}, None


GREET = [("Hello!", "Hello! How can I help you?"), ("Hi", "Hi! What can I do for you?"),
         ("Hi there!", "Hi! What can I do for you?"), ("Hello", "Hello! How can I help you?"), ("Hey", "Hi! What can I do for you?"),
         ("Thank you!", "You are welcome."), ("Thanks", "You are welcome."), ("Goodbye", "Goodbye!"),
         ("Who are you?", "I am tiny-v4, a small demonstration model of Affinity."),
         ("What are you?", "I am tiny-v4, a small demonstration model of Affinity."),
         ("What is your name?", "My name is tiny-v4."), ("How are you?", "I am fine, thank you. How can I help you?"),
         ("What can you do?", "I know some capitals, do small sums, find notes in a long text, write JSON and call tools."),
         ("Good morning", "Good morning! How can I help you?"), ("Say hello", "Hello!"), ("Ping", "Pong.")]
CAPITAL_ASK = ["What is the capital of {c}?", "Which city is the capital of {c}?", "Tell me the capital of {c}.",
               "capital of {c}?", "The capital of {c} is", "What's the capital city of {c}?"]


def exchange(r):
    """One (question, thought, answer pieces)."""
    k = r.random()
    if k < .34:
        if r.random() < .45:
            c, cap, _, _ = r.choice(COUNTRIES)
            q = r.choice(CAPITAL_ASK).format(c=c)
            return q, f"The user asks for the capital of {c}. It is {cap}.", [(f"The capital of {c} is", 1), (f" {cap}", 2), (".", 1)]
        s, a, e, q, _ = fact_forms(r)
        if r.random() < .2:
            q = s
        return q, f"I know this. {s}{a}.", [(s, 1), (a, 2), (e, 1)]
    if k < .52:
        e, work, res = arithmetic(r)
        q = r.choice(["What is {e}?", "Compute {e}.", "{e} =", "How much is {e}?", "Calculate {e}"]).format(e=e)
        return q, work, [(f"{e} =", 1), (f" {res}", 1.5), (".", 1)]
    if k < .64:
        q, a = r.choice(GREET)
        return q, "A short friendly answer is enough.", [(a, 1)]
    if k < .78:
        rec, words = record(r)
        while not words:
            rec, words = record(r)
        q = r.choice(["Give me a JSON object with {w}.", "Write JSON with {w}.", "Return a JSON object: {w}."]).format(w=words)
        return q, f"The answer is a JSON object with the keys {', '.join(rec)}.", [(dumps(rec), 1)]
    if k < .86:
        w = value(r, r.randint(1, 5))
        q, a = r.choice([("Repeat after me: {w}", "{w}"), ("Say: {w}", "{w}"), ("Write the words {w} in upper case.", "{u}"),
                         ("How many words are in \"{w}\"?", "There are {n} words."), ("Spell {f}.", "{s}")])
        f = w.split()[0]
        m = dict(w=w, u=w.upper(), n=len(w.split()), f=f, s=" ".join(f))
        if len(w.split()) == 1 and "How many" in q:
            q, a = "Repeat after me: {w}", "{w}"
        return q.format(**m), "I do as asked.", [(a.format(**m), 1)]
    if k < .94:
        f = function(r)
        return f[0], "I write a short Python function.", [("```python\n" + f[1] + "```", 1)]
    xs = [r.randint(0, 99) for _ in range(r.randint(3, 5))]
    q, a = r.choice([("Sort these numbers: {x}", "{s}"), ("Which number is the largest: {x}?", "The largest number is {m}."),
                     ("Count from {a} to {b}.", "{c}")])
    lo = r.randint(0, 30)
    hi = lo + r.randint(2, 8)
    m = dict(x=", ".join(map(str, xs)), s=", ".join(map(str, sorted(xs))), m=max(xs), a=lo, b=hi,
             c=", ".join(map(str, range(lo, hi + 1))))
    return q.format(**m), "I look at the numbers one by one.", [(a.format(**m), 1)]


def chat(r):
    """One to five turns, thinking on or off. Earlier reasoning is dropped, as the encoder does without tools."""
    thinking = r.random() < .35
    turns = r.choice([1, 1, 1, 2, 3, 5])
    d = system(r, thinking=thinking)
    for i in range(turns):
        q, t, a = exchange(r)
        d += [(USER, 1 if i else .1), (q, .1), (ASSISTANT, .3)]
        if thinking and i == turns - 1:
            d += [(THINK, .1), (t, 1), (ENDTHINK, 1)]
        else:
            d += [(ENDTHINK, .1)]
        d += a + [(EOS, 1)]
    return d


# ---------------------------------------------------------------- tools

def num(lo, hi):
    return lambda r: r.randint(lo, hi)


def one(xs):
    return lambda r: r.choice(xs)


TIMES = [f"{h:02d}:{m:02d}" for h in range(24) for m in (0, 15, 30, 45)]
DAYS = [n[0] for n in NEXT[:7]]
DATES = [f"2026-{m:02d}-{d:02d}" for m in range(1, 13) for d in range(1, 29)]
FILES = [f"{a}.{e}" for a in NOUN for e in ("txt", "py", "json", "md")]
S, I, B = "string", "integer", "boolean"
two = lambda r: value(r, 2)
# verbs, object, description, parameters (name choices, type, maker), request templates
TOOLS = [
    ("get fetch check".split(), "weather", "Get the weather", [(("location", "city", "place"), S, one(CITIES)), (("days", "num_days"), I, num(1, 9))],
     ["What is the weather in {0} for {1} days?", "Weather in {0} for the next {1} days", "Tell me the weather in {0}, {1} days."]),
    ("get fetch check".split(), "temperature", "Get the temperature", [(("location", "city", "place"), S, one(CITIES))],
     ["How warm is it in {0}?", "What is the temperature in {0}?", "Temperature in {0} please"]),
    ("send write".split(), "email", "Send an email", [(("to", "recipient"), S, one(NAMES)), (("subject", "title"), S, two)],
     ["Send an email to {0} about {1}.", "Write to {0} with the subject {1}.", "Email {0}: {1}"]),
    ("set start".split(), "timer", "Start a timer", [(("minutes", "duration"), I, num(1, 90))],
     ["Set a timer for {0} minutes.", "Start a {0} minute timer.", "Wake me in {0} minutes."]),
    ("set add".split(), "alarm", "Set an alarm", [(("time", "at"), S, one(TIMES)), (("day", "weekday"), S, one(DAYS))],
     ["Set an alarm for {0} on {1}.", "Wake me at {0} on {1}."]),
    ("play start".split(), "song", "Play a song", [(("title", "song"), S, two)], ["Play {0}.", "I want to hear {0}.", "Play the song {0}"]),
    ("search find".split(), "web", "Search the web", [(("query", "q", "text"), S, two)],
     ["Search the web for {0}.", "Look up {0}.", "Find pages about {0}."]),
    ("translate convert".split(), "text", "Translate text", [(("text", "input"), S, two), (("language", "target"), S, one(LANGS))],
     ["Translate {0} into {1}.", "How do you say {0} in {1}?"]),
    ("create add".split(), "event", "Add a calendar event", [(("title", "name"), S, two), (("date", "day"), S, one(DATES))],
     ["Add the event {0} on {1}.", "Put {0} in my calendar on {1}."]),
    ("convert exchange".split(), "currency", "Convert money", [(("amount", "value"), I, num(1, 999)), (("country", "target"), S, one([c[0] for c in COUNTRIES]))],
     ["Convert {0} dollars to the money of {1}.", "How much is {0} dollars in {1}?"]),
    ("set switch".split(), "light", "Switch a light", [(("room", "where"), S, one(["kitchen", "garden", "library", "hall", "school", "garage"])), (("on", "state"), B, one([True, False]))],
     ["Switch the light in the {0} {1:on}.", "Turn {1:on} the {0} light."]),
    ("set adjust".split(), "thermostat", "Set the heating", [(("room", "where"), S, one(["kitchen", "garden", "library", "hall", "school", "garage"])), (("degrees", "temperature"), I, num(10, 30))],
     ["Set the {0} to {1} degrees.", "Heat the {0} to {1} degrees."]),
    ("book reserve".split(), "table", "Book a table", [(("city", "place"), S, one(CITIES)), (("people", "guests"), I, num(1, 12))],
     ["Book a table in {0} for {1} people.", "Reserve a table for {1} in {0}."]),
    ("book find".split(), "flight", "Book a flight", [(("origin", "from"), S, one(CITIES)), (("destination", "to"), S, one(CITIES))],
     ["Book a flight from {0} to {1}.", "I want to fly from {0} to {1}."]),
    ("book find".split(), "hotel", "Book a hotel", [(("city", "place"), S, one(CITIES)), (("nights", "days"), I, num(1, 20))],
     ["Book a hotel in {0} for {1} nights.", "I need a hotel in {0}, {1} nights."]),
    ("create add".split(), "note", "Save a note", [(("text", "content"), S, lambda r: value(r, r.randint(2, 4)))],
     ["Note: {0}", "Write down: {0}", "Save the note {0}"]),
    ("add put".split(), "todo", "Add a task", [(("task", "item"), S, two), (("priority", "level"), I, num(1, 5))],
     ["Add the task {0} with priority {1}.", "New task {0}, priority {1}"]),
    ("read open".split(), "file", "Read a file", [(("path", "filename"), S, one(FILES))],
     ["Read the file {0}.", "What is in {0}?", "Open {0}", "Show me {0}"]),
    ("write save".split(), "file", "Write a file", [(("path", "filename"), S, one(FILES)), (("content", "text"), S, two)],
     ["Write {1} to the file {0}.", "Save {1} in {0}."]),
    ("define explain".split(), "word", "Define a word", [(("word", "term"), S, one(NOUN))],
     ["Define {0}.", "What does {0} mean?", "Look up the word {0}."]),
    ("get measure".split(), "distance", "Distance of two cities", [(("origin", "start"), S, one(CITIES)), (("destination", "end"), S, one(CITIES))],
     ["How far is it from {0} to {1}?", "Distance from {0} to {1}"]),
    ("get read".split(), "news", "Get the news", [(("topic", "subject"), S, one(TOPICS)), (("count", "limit"), I, num(1, 20))],
     ["Give me {1} news about {0}.", "Show {1} stories on {0}."]),
    ("order buy".split(), "food", "Order food", [(("dish", "item"), S, one(FOODS)), (("quantity", "count"), I, num(1, 9))],
     ["Order {1} {0}.", "I would like {1} {0}, please."]),
    ("add sum".split(), "numbers", "Add numbers", [(("numbers", "values"), "array", lambda r: [r.randint(0, 99) for _ in range(r.randint(2, 4))])],
     ["Use the tool to add {0:list}.", "Add the numbers {0:list}."]),
    ("get find".split(), "user", "Look up a user", [(("id", "user_id"), I, num(1, 9999))],
     ["Look up user {0}.", "Who is user number {0}?"]),
    ("roll throw".split(), "dice", "Roll dice", [(("sides", "faces"), I, num(4, 20)), (("count", "times"), I, num(1, 6))],
     ["Roll {1} dice with {0} sides.", "Throw a {0} sided dice {1} times."]),
    ("call phone".split(), "contact", "Call someone", [(("name", "contact"), S, one(NAMES))], ["Call {0}.", "Please phone {0}."]),
    ("run start".split(), "command", "Run a command", [(("command", "cmd"), S, lambda r: r.choice(["ls", "cat", "rm", "wc", "head"]) + " " + r.choice(FILES))],
     ["Run {0}", "Run the command {0}", "Execute {0}"]),
]


class Slot:
    """A value that formats as the user would say it."""

    def __init__(self, v):
        self.v = v

    def __format__(self, spec):
        if spec == "on":
            return "on" if self.v else "off"
        if spec == "list":
            return " and ".join(map(str, self.v))
        return str(self.v)


VERBS = """get fetch check send write set start add play search find translate convert create exchange switch adjust book reserve put
 read open save define explain measure order buy sum roll throw call phone run show make use do load query list new ask tell give""".split()
AFFIX = "the_{} my_{} {}_name {}_value target_{} new_{} {}_id input_{} {}_arg".split()


def make_tool(r, family, wide=False):
    """A tool of a family with its own choice of names; returns (schema, parameter specs).

    `wide` draws from many more names, so that only the schema tells them; it is for training."""
    verbs, noun, desc, params, _ = family
    name = f"{r.choice(verbs)}_{noun}" if r.random() < .75 else f"{noun}_{r.choice(verbs)}"
    ps = [(r.choice(names), t, make) for names, t, make in params]
    if wide and r.random() < .6:
        v = r.choice(VERBS)
        name = r.choice([f"{v}_{noun}", f"{noun}_{v}", f"{v}_{r.choice(NOUN)}", f"{v}_{noun}_{r.randint(2, 9)}"])
    if wide:
        ps = [(r.choice(AFFIX).format(n) if r.random() < .3 else n, t, make) for n, t, make in ps]
        if len({n for n, _, _ in ps}) < len(ps):
            return make_tool(r, family, wide)
    props = {}
    for n, t, _ in ps:
        props[n] = {"type": t, "items": {"type": "integer"}} if t == "array" else {"type": t}
    return {"name": name, "description": desc,
            "parameters": {"type": "object", "properties": props, "required": [p[0] for p in ps]}}, ps


def call_text(name, args):
    """A tool call as the model must write it."""
    ps = "\n".join(f'<{D}parameter name="{k}" string="{"true" if isinstance(v, str) else "false"}">'
                   f"{v if isinstance(v, str) else dumps(v)}</{D}parameter>" for k, v in args.items())
    return f'\n\n<{D}tool_calls>\n<{D}invoke name="{name}">\n{ps}\n</{D}invoke>\n</{D}tool_calls>'


def call_pieces(name, args):
    """The same as pieces: names and values weigh more than the markup around them."""
    d = [(f'\n\n<{D}tool_calls>\n<{D}invoke name="', 1), (name, 4), ('">\n', 1)]
    for i, (k, v) in enumerate(args.items()):
        text = isinstance(v, str)
        d += [(("\n" if i else "") + f'<{D}parameter name="', 1), (k, 4), (f'" string="{"true" if text else "false"}">', 1),
              (v if text else dumps(v), 4), (f"</{D}parameter>", 1)]
    return d + [(f"\n</{D}invoke>\n</{D}tool_calls>", 1)]


def tool_case(r, wide=False):
    """(tools, chosen tool, arguments, request)."""
    fams = r.sample(TOOLS, r.choice([1, 2, 2, 3, 3]))
    made, seen = [], set()
    for f in fams:
        t, ps = make_tool(r, f, wide)
        if t["name"] not in seen:
            seen.add(t["name"])
            made.append((f, t, ps))
    f, t, ps = r.choice(made)
    args = {n: make(r) for n, _, make in ps}
    text = r.choice(f[4]).format(*[Slot(v) for v in args.values()])
    if r.random() < .15:
        text = r.choice(["Please: ", "Hi! ", "Can you help me? "]) + text
    return [m[1] for m in made], t, args, text


def tool_key(tools, args):
    """Which cases are held out: one in eight, by tool names and arguments."""
    return hashlib.md5(dumps([[t["name"] for t in tools], args]).encode()).digest()[0] % 8 == 0


def tool_chat(r):
    """A request, a call, often the result and the closing answer."""
    while True:
        tools, t, args, text = tool_case(r, True)
        if not tool_key(tools, args):
            break
    thinking = r.random() < .4
    d = system(r, tools, thinking)
    if r.random() < .12:                                    # a question that needs no tool
        q, th, a = exchange(r)
        d += [(USER, .1), (q, .1), (ASSISTANT, .3)]
        d += [(THINK, .1), (th, 1), (ENDTHINK, 1)] if thinking else [(ENDTHINK, .1)]
        d += a + [(EOS, 1)]
    d += [(USER, .1), (text, .1), (ASSISTANT, .3)]
    d += [(THINK, .1), ("The tool ", 1), (t["name"], 4), (" fits.", 1), (ENDTHINK, 1)] if thinking else [(ENDTHINK, .1)]
    d += call_pieces(t["name"], args) + [(EOS, 1)]
    if r.random() < .35:
        res, say = r.choice([({"status": "ok"}, "Done."), ({"result": 0}, None), ({"error": "not found"}, "The tool says: not found.")])
        if say is None:
            res["result"] = r.choice([r.randint(0, 99), value(r, 2)])
            say = f"The result is {res['result']}."
        d += [(USER, .2), ("<tool_result>", .2), (dumps(res), .1), ("</tool_result>", .2), (ASSISTANT, .3)]
        d += [(THINK, .1), ("I have the result.", 1), (ENDTHINK, 1)] if thinking else [(ENDTHINK, .1)]
        d += [(say, 1), (EOS, 1)]
    return d


# ---------------------------------------------------------------- code and JSON

def function(r):
    """(request, source) of a small Python function."""
    a, b = r.choice(["a b", "x y", "left right", "first second", "m n"] ).split()
    n, k = r.choice(NOUN), r.randint(2, 20)
    xs = r.choice(["items", "values", "numbers", "data"])
    v = r.choice(["x", "item", "value", "n"])
    what, source = r.choice([
        ("a Python function that adds two numbers", f"def add({a}, {b}):\n    \"\"\"Return the sum of {a} and {b}.\"\"\"\n    return {a} + {b}\n"),
        ("a Python function that multiplies two numbers", f"def multiply({a}, {b}):\n    \"\"\"Return the product of {a} and {b}.\"\"\"\n    return {a} * {b}\n"),
        ("a Python function that returns the larger number", f"def larger({a}, {b}):\n    \"\"\"Return the larger of {a} and {b}.\"\"\"\n    if {a} > {b}:\n        return {a}\n    return {b}\n"),
        (f"a Python function that counts the {xs}", f"def count({xs}):\n    \"\"\"Return the number of {xs}.\"\"\"\n    total = 0\n    for {v} in {xs}:\n        total += 1\n    return total\n"),
        (f"a Python function that sums the {xs}", f"def total({xs}):\n    \"\"\"Return the sum of {xs}.\"\"\"\n    result = 0\n    for {v} in {xs}:\n        result += {v}\n    return result\n"),
        (f"a Python class for a {n}", f"class {n.capitalize()}:\n    \"\"\"A {n} with a name.\"\"\"\n\n    def __init__(self, name):\n        self.name = name\n\n    def __repr__(self):\n        return f\"{n.capitalize()}({{self.name!r}})\"\n"),
        (f"a Python function that prints {n} {k} times", f"def print_{n}():\n    \"\"\"Print {n} {k} times.\"\"\"\n    for i in range({k}):\n        print(\"{n}\")\n"),
        (f"a Python function that multiplies a number by {k}", f"def times_{k}({v}):\n    \"\"\"Return {v} times {k}.\"\"\"\n    return {v} * {k}\n"),
        ("a Python function that checks for an even number", f"def is_even({v}):\n    \"\"\"Return True if {v} is even.\"\"\"\n    return {v} % 2 == 0\n"),
        ("a Python function for the factorial", "def factorial(n):\n    \"\"\"Return the factorial of n.\"\"\"\n    if n <= 1:\n        return 1\n    return n * factorial(n - 1)\n"),
        (f"a Python function that reads a {n} file", f"def read_{n}(path):\n    \"\"\"Return the lines of the {n} file.\"\"\"\n    with open(path) as f:\n        return f.read().splitlines()\n"),
    ])
    return f"Write {what}.", source


def code_raw(r):
    """A small module of such functions."""
    d = [(BOS, 0)] if r.random() < .7 else []
    d += [(r.choice([f"\"\"\"Tools for the {pair(r)}.\"\"\"\n\n\n", "import sys\n\n\n", "# example\n\n\n", ""]), .2)]
    d += [("\n\n".join(function(r)[1] for _ in range(r.randint(1, 5))), 1), ("\n", 1)]
    return d + [(EOS, 1)]


def json_raw(r):
    """A list of records of one kind."""
    d = [(BOS, 0)] if r.random() < .7 else []
    rows = [record(r)[0] for _ in range(r.randint(2, 8))]
    return d + [(dumps(rows) if r.random() < .5 else "\n".join(map(dumps, rows)), .7), ("\n", 1), (EOS, 1)]


def sums_raw(r):
    d = [(BOS, 0)] if r.random() < .7 else []
    for _ in range(r.randint(3, 12)):
        e, _, res = arithmetic(r)
        d += [(f"{e} =", .1), (f" {res}", 1.5), ("\n", 1)]
    return d + [(EOS, 1)]


# ---------------------------------------------------------------- recall

STYLES = [("The code of the {k} is", " {v}", ".", "What is the code of the {k}?"),
          ("The owner of the {k} is", " {v}", ".", "Who is the owner of the {k}?"),
          ("The name of the {k} is", " {v}", ".", "What is the name of the {k}?"),
          ("The password of the {k} is", " {v}", ".", "What is the password of the {k}?")]


def lookup(r, tokens):
    """Lines `key: value`; keys come back again and again, so most lines can be looked up. About `tokens` long."""
    pool = max(4, int(tokens / 9 * r.uniform(.15, .6)))
    keys = list({pair(r) for _ in range(pool)})
    words = r.choice([1, 1, 2, 3])
    table = {k: value(r, words) for k in keys}
    sep = r.choice([":", " =", " is", " ->"])
    d = [(BOS, 0)]
    order = keys + [r.choice(keys) for _ in range(max(3, int(tokens / 9) - len(keys)))]
    if r.random() < .5:
        head = order[:len(keys)]
        r.shuffle(head)
        order = head + order[len(keys):]
    else:
        r.shuffle(order)
    seen = set()
    for k in order:
        d += [(k, .03), (sep, .3), (" " + table[k], 1.5 if k in seen else .05), ("\n", .3)]
        seen.add(k)
    return d + [(EOS, .3)]


def copy(r, tokens):
    """Random words, then the same words again."""
    n = max(4, min(int(tokens / 2.4), 400))
    text = " ".join(r.choice(ADJ + NOUN + NAMES) for _ in range(n))
    return [(BOS, 0), (r.choice(["Text: ", "Words: ", "Say "]), .1), (text, .05), ("\nCopy:", .3), (" " + text, 1), ("\n", .5), (EOS, .5)]


def needle(r, tokens, filler, held=False, needles=0, words=0):
    """A long text with notes in it, then questions about the notes, in chat form. `filler(r, n)` gives n tokens of text.

    Returns (document, answers); with `held` only one question is asked and the answer piece is left out.
    """
    n = needles or max(1, min(32, int(tokens / r.choice([50, 90, 150, 300]))))
    keys = list(dict.fromkeys(pair(r, held) for _ in range(n)))
    notes = [(k, value(r, words), STYLES[r.randrange(len(STYLES))]) for k in keys]
    ask = r.sample(notes, 1 if held else min(len(notes), r.choice([4, 8, 16])))
    room = max(0, tokens - 14 * len(notes) - 27 * len(ask) - 12) // (len(notes) + 1)
    d = [(BOS, 0), (r.choice(SYSTEMS), .05), (USER, .1)]
    for k, v, (s, a, e, _) in notes:
        d += [(filler(r, room), .3), ("\n" + s.format(k=k) + a.format(v=v) + e + "\n", .05)]
    d += [(filler(r, room), .3), ("\n\n", .1)]
    for i, (k, v, (s, a, e, q)) in enumerate(ask):
        d += [(q.format(k=k), .1), (ASSISTANT, .3), (ENDTHINK, .1)]
        if held:
            return d, s.format(k=k) + a.format(v=v) + e
        d += [(s.format(k=k), 1), (a.format(v=v), 3), (e, 1), (EOS, 1)]
        if i + 1 < len(ask):
            d += [(USER, .3)]
    return d, None
