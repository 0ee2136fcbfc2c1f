"""Word lists and fact tables of the generated data."""
import os

HERE = os.path.dirname(os.path.abspath(__file__))
COUNTRIES = [tuple(s.rstrip("\n").split("\t")) for s in open(os.path.join(HERE, "facts.tsv"), encoding="utf-8")
             if s.strip() and s[0] != "#"]
CITIES = sorted({c[1] for c in COUNTRIES})

# subject, answer: asked as PROMPT -> answer, in words and in chat
ELEMENTS = [("gold", "Au"), ("silver", "Ag"), ("iron", "Fe"), ("copper", "Cu"), ("oxygen", "O"), ("hydrogen", "H"),
            ("carbon", "C"), ("helium", "He"), ("sodium", "Na"), ("lead", "Pb"), ("tin", "Sn"), ("zinc", "Zn")]
OPPOSITES = [("hot", "cold"), ("big", "small"), ("light", "dark"), ("high", "low"), ("fast", "slow"), ("open", "closed"),
             ("early", "late"), ("young", "old"), ("wet", "dry"), ("happy", "sad"), ("rich", "poor"), ("strong", "weak")]
COLOURS = [("grass", "green"), ("snow", "white"), ("coal", "black"), ("the sky", "blue"), ("blood", "red"),
           ("a lemon", "yellow"), ("milk", "white"), ("a carrot", "orange")]
LEGS = [("a dog", "four"), ("a spider", "eight"), ("a bird", "two"), ("an ant", "six"), ("a horse", "four"),
        ("a snake", "no"), ("a bee", "six"), ("a cat", "four")]
NEXT = ([(a, b, "day") for a, b in zip("Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split(),
                                       "Tuesday Wednesday Thursday Friday Saturday Sunday Monday".split())]
        + [(a, b, "month") for a, b in zip(
            "January February March April May June July August September October November December".split(),
            "February March April May June July August September October November December January".split())])

ADJ = """red blue green black white golden silver old young quiet loud bright dark small large tall short warm cold sweet
 bitter soft hard heavy light quick slow brave gentle proud calm wild hidden broken empty full sharp smooth rough round
 flat deep narrow wide clean dusty dry wet early late strange simple plain noble royal secret lonely happy sad lazy busy
 clever foolish honest rich poor strong weak fresh sour frozen wooden iron copper paper glass stone eastern western
 northern southern ancient modern distant nearby""".split()
NOUN = """river mountain valley forest garden harbor island bridge tower castle village city market temple school library
 kitchen window door table chair lamp mirror clock bell drum flute violin piano book letter map key coin ring crown
 sword shield wheel wagon boat ship train engine rocket planet star moon sun cloud storm wind rain snow fire lantern
 candle bottle basket box bag coat hat shoe glove blanket carpet curtain pillow apple pear cherry lemon orange banana
 bread cheese butter honey salt pepper sugar coffee tea milk water wine horse dog cat bird fish lion tiger bear wolf fox
 rabbit mouse eagle owl crow swan goose duck frog snake spider bee ant farmer baker doctor teacher sailor soldier painter
 singer writer king queen prince captain hunter""".split()
NAMES = """Anna Ben Clara David Emma Frank Grace Henry Iris Jack Kate Leo Maria Nora Oscar Paul Rosa Sam Tara Victor Wendy
 Alice Boris Carol Dora Eric Fiona George Helen Ivan Julia Karl Linda Mark Nina Oliver Peter Robert Sarah Thomas Laura
 Simon Martin Lucy Daniel Adam Eva Felix Gina Hugo""".split()
LANGS = sorted({c[3] for c in COUNTRIES})
FOODS = "soup rice pasta pizza salad bread cake curry fish steak eggs noodles tacos pie".split()
TOPICS = """music sports weather science history politics space food travel art health money cars films games books
 nature farming""".split()


def every():
    """All words that the generated data leans on."""
    out = set(ADJ + NOUN + NAMES + LANGS + FOODS + TOPICS)
    for c in COUNTRIES:
        for f in c:
            out |= set(f.split())
    for table in (OPPOSITES, COLOURS, LEGS, NEXT):
        for row in table:
            out |= {w for f in row for w in f.split()}
    return out
