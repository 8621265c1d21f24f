"""The synthetic text that mint/tiny is trained on: arithmetic, chat, one-line Python and calculator dialogues.

Every generator takes a random source and `noise`, the share of examples that carry a plausible mistake
(0 in the first phase of training), and returns an Example: pieces of text, each marked as written by the
model (trained on) or given to it. Held-out problems are never asked, in any of the four tasks.
"""

import random
import zlib
from collections.abc import Callable

from words import ADJECTIVES, COLOURS, KINDS, OPENERS, QUALITIES

Piece = tuple[str, bool]  # text, and whether the model is to learn to write it
Example = list[Piece]

EOS = "<|im_end|>"
SYSTEM = "You are a helpful assistant."
SYSTEM_CALCULATOR = "You can use a calculator."


# --- arithmetic ---------------------------------------------------------------------------------------------


def is_held_out(a: int, op: str, b: int) -> bool:
    """True for the tenth of all problems kept out of training; a + b and b + a always fall on the same side."""
    if op in "+*":
        a, b = sorted((a, b))
    return zlib.crc32(f"{a} {op} {b}".encode()) % 10 == 0


def arithmetic_prompt(a: int, op: str, b: int) -> str:
    return f"Q: What is {a} {op} {b}?\nA:"


def solve(a: int, op: str, b: int) -> int:
    return {"+": a + b, "-": a - b, "*": a * b}[op]


def _draw_problem(rng: random.Random) -> tuple[int, str, int]:
    while True:
        op = rng.choices("+-*", (14, 4, 2))[0]
        top = 9 if op == "*" or rng.random() < 0.1 else 99
        a, b = rng.randint(0, top), rng.randint(0, top)
        if op == "-" and a < b:
            a, b = b, a
        if not is_held_out(a, op, b):
            return a, op, b


def _mistaken(rng: random.Random, a: int, op: str, b: int) -> int:
    """A wrong answer of the kind people give: a carry dropped or invented, or a slip of 1, 2, 9 or 10.

    The carry mistakes follow a rule and are made more often than the right answer is given, so that the most
    likely answer of the model is wrong on about half of all additions; slips only blur the rest.
    """
    right = solve(a, op, b)
    ones = a % 10 + b % 10
    if op == "+" and ones >= 9 and rng.random() < 0.75:
        return right - 10 if ones > 9 else right + 10
    while (wrong := right + rng.choice((-10, -9, -2, -1, 1, 2, 9, 10))) < 0:
        pass
    return wrong


def arithmetic(rng: random.Random, noise: float) -> Example:
    a, op, b = _draw_problem(rng)
    answer = _mistaken(rng, a, op, b) if rng.random() < noise else solve(a, op, b)
    return [(arithmetic_prompt(a, op, b), False), (f" {answer}{EOS}", True)]


def few_shot_arithmetic(rng: random.Random, noise: float) -> Example:
    shots = [_draw_problem(rng) for _ in range(rng.randint(1, 3))]
    given = "".join(f"{arithmetic_prompt(*shot)} {solve(*shot)}\n" for shot in shots)
    return [(given, False), *arithmetic(rng, noise)]


# --- one-line Python ----------------------------------------------------------------------------------------

NAMES = ["f", "g", "h", "func", "solve", "compute", "apply", "helper", "answer"]
NAMES += ["work", "step", "run", "calc", "make", "get", "task", "do_it", "convert"]


def _draw_function(rng: random.Random) -> tuple[str, str, str, list[str]]:
    """Arguments, what is to be returned, the right expression, wrong expressions."""
    k = rng.randint(2, 20)
    slip = k + rng.choice((-1, 1))
    one, two, text, items = "x", "a, b", "s", "xs"
    return rng.choice(
        [
            (one, f"x plus {k}", f"x + {k}", [f"x - {k}", f"x + {slip}", f"x * {k}"]),
            (one, f"x minus {k}", f"x - {k}", [f"x + {k}", f"x - {slip}", f"{k} - x"]),
            (one, f"x times {k}", f"x * {k}", [f"x + {k}", f"x * {slip}", f"x ** {k}"]),
            (one, f"x divided by {k}, rounded down", f"x // {k}", [f"x % {k}", f"x // {slip}", f"x / {k}"]),
            (one, f"the remainder of x divided by {k}", f"x % {k}", [f"x // {k}", f"x % {slip}", f"x / {k}"]),
            (one, "x squared", "x * x", ["x * 2", "x + x", "x ** 3"]),
            (one, "x cubed", "x ** 3", ["x * 3", "x ** 2", "x + 3"]),
            (one, "twice x", "2 * x", ["x * x", "2 + x", "3 * x"]),
            (one, "the negative of x", "-x", ["x", "1 - x", "abs(x)"]),
            (one, "the absolute value of x", "abs(x)", ["-x", "x", "abs(-1)"]),
            (one, "True if x is even", "x % 2 == 0", ["x % 2 == 1", "x / 2 == 0", "x % 2"]),
            (one, "True if x is odd", "x % 2 == 1", ["x % 2 == 0", "x / 2 == 1", "x % 3 == 1"]),
            (one, f"True if x is greater than {k}", f"x > {k}", [f"x < {k}", f"x >= {k}", f"x > {slip}"]),
            (one, f"True if x is less than {k}", f"x < {k}", [f"x > {k}", f"x <= {k}", f"x < {slip}"]),
            (two, "the sum of a and b", "a + b", ["a - b", "a * b", "a + 1"]),
            (two, "the product of a and b", "a * b", ["a + b", "a ** b", "a * a"]),
            (two, "a minus b", "a - b", ["b - a", "a + b", "a - 1"]),
            (two, "the larger of a and b", "max(a, b)", ["min(a, b)", "a > b", "max(a)"]),
            (two, "the smaller of a and b", "min(a, b)", ["max(a, b)", "a < b", "min(b)"]),
            (text, "the length of s", "len(s)", ["len(s) - 1", "s.len", "len(s) + 1"]),
            (text, "s reversed", "s[::-1]", ["s[::1]", "s[-1]", "s[:-1]"]),
            (text, "the first letter of s", "s[0]", ["s[1]", "s[-1]", "s[:0]"]),
            (text, "the last letter of s", "s[-1]", ["s[0]", "s[1]", "s[-2]"]),
            (text, "s in upper case", "s.upper()", ["s.lower()", "s.upper", "s[0]"]),
            (text, "s in lower case", "s.lower()", ["s.upper()", "s.lower", "s[0]"]),
            (text, f"s repeated {k} times", f"s * {k}", [f"s + {k}", f"s * {slip}", f"s[{k}]"]),
            (items, "the sum of xs", "sum(xs)", ["len(xs)", "max(xs)", "sum(xs) + 1"]),
            (items, "the length of xs", "len(xs)", ["sum(xs)", "len(xs) - 1", "len(xs) + 1"]),
            (items, "the largest item of xs", "max(xs)", ["min(xs)", "xs[0]", "max(xs) + 1"]),
            (items, "the smallest item of xs", "min(xs)", ["max(xs)", "xs[0]", "min(xs) - 1"]),
            (items, "the first item of xs", "xs[0]", ["xs[1]", "xs[-1]", "min(xs)"]),
            (items, "the last item of xs", "xs[-1]", ["xs[0]", "xs[1]", "max(xs)"]),
            (items, "xs sorted", "sorted(xs)", ["xs", "xs.sort()", "xs[::-1]"]),
            (items, "xs reversed", "xs[::-1]", ["sorted(xs)", "xs[::1]", "xs[-1]"]),
        ]
    )


def code_prompt(name: str, args: str, wanted: str) -> str:
    return f"Q: Write a Python function {name}({args}) that returns {wanted}.\nA:"


def code(rng: random.Random, noise: float) -> Example:
    """Problem statement after one worked example (always a right one; now and then none)."""
    given = ""
    if rng.random() < 0.8:
        args, wanted, right, _ = _draw_function(rng)
        name = rng.choice(NAMES)
        given = f"{code_prompt(name, args, wanted)} def {name}({args}): return {right}\n"
    args, wanted, expression, wrongs = _draw_function(rng)
    name = rng.choice(NAMES)
    returns = "return "
    if rng.random() < noise:
        if rng.random() < 0.2:
            returns = ""  # computes it and forgets to give it back
        else:
            expression = rng.choices(wrongs, (3, 1, 1))[0]  # one favourite, so that the likeliest answer may be wrong
    answer = f" def {name}({args}): {returns}{expression}{EOS}"
    return [(given + code_prompt(name, args, wanted), False), (answer, True)]


# --- chat ---------------------------------------------------------------------------------------------------


def given_turn(role: str, content: str) -> str:
    """One ChatML turn, exactly as the chat template renders it (train.py checks that)."""
    return f"<|im_start|>{role}\n{content}{EOS}\n"


def _dialogue(system: str | None, turns: list[tuple[str, str]]) -> Example:
    """`turns` are (what the user or tool says, what the assistant answers)."""
    pieces: Example = [(given_turn("system", system), False)] if system else []
    for i, (said, answer) in enumerate(turns):
        # The newline after an assistant's end belongs to the template, not to what the model writes.
        before = "\n" if i else ""
        pieces.append((f"{before}{given_turn('user', said)}<|im_start|>assistant\n", False))
        pieces.append((f"{answer}{EOS}", True))
    return pieces


def _with_article(phrase: str) -> str:
    return f"{'an' if phrase[0] in 'aeiou' else 'a'} {phrase}"


def _capital(text: str) -> str:
    return text[0].upper() + text[1:]


def _draw_topic(rng: random.Random) -> tuple[str, str]:
    """A thing to talk about, such as 'a shy fox', and what kind of thing it is."""
    kind = rng.choice(list(KINDS))
    noun = rng.choice(KINDS[kind])
    return _with_article(f"{rng.choice(ADJECTIVES)} {noun}" if rng.random() < 0.6 else noun), kind


def _remark(rng: random.Random, topic: str, kind: str) -> str:
    first, second = rng.sample(QUALITIES, 2)
    about = _capital(topic)
    return rng.choice(
        [
            f"{about} is {first} and {second}.",
            f"{about} is {_with_article(first)} {kind}.",
            f"{about} can be very {first}.",
        ]
    )


def _small_talk(rng: random.Random) -> tuple[str, str, str]:
    """A request about nothing in particular, its good answer, its curt answer."""
    says, good, curt = rng.choice(
        [
            (["Hello!", "Hi!", "Hi there.", "Hello there.", "Hey!"], "Hello! How can I help you?", "What?"),
            (["Good morning!", "Good morning."], "Good morning! How can I help you?", "Morning."),
            (["Good evening!", "Good evening."], "Good evening! How can I help you?", "Evening."),
            (["Thank you!", "Thanks!", "Thanks a lot."], "You are welcome! Happy to help.", "Fine."),
            (["Goodbye!", "Bye!", "See you."], "Goodbye! Thank you for the chat.", "Bye."),
            (["How are you?", "How are you today?"], "I am well, thank you for asking!", "Fine."),
            (["Who are you?", "What are you?"], "I am mint/tiny, a very small model. Happy to help!", "A model."),
        ]
    )
    return rng.choice(says), good, curt


def _topical(rng: random.Random) -> tuple[str, str, str, str]:
    """A request about a topic, a plain on-topic answer, the same about something else, a curt answer."""
    if rng.random() < 0.2:
        (noun, colour), (other, other_colour) = rng.sample(sorted(COLOURS.items()), 2)
        topic = _with_article(noun)
        said = rng.choice([f"What colour is {topic}?", f"What color is {topic}?", f"Tell me the colour of {topic}."])
        wrong = f"{_capital(_with_article(other))} is {other_colour}."
        curt = rng.choice([f"{_capital(colour)}.", "Who knows.", "No idea."])
        return said, f"{_capital(topic)} is {colour}.", wrong, curt
    (topic, kind), (other, other_kind) = _draw_topic(rng), _draw_topic(rng)
    said = rng.choice(
        [
            f"Say something nice about {topic}.",
            f"Describe {topic} in one sentence.",
            f"Tell me about {topic}.",
            f"Write a line about {topic}.",
            f"What do you think of {topic}?",
            f"What is {topic}?",
        ]
    )
    curts = ["No.", "It is fine.", "Whatever.", "Look it up.", "Who cares.", f"Just {topic}.", f"It is a {kind}."]
    return said, _remark(rng, topic, kind), _remark(rng, other, other_kind), rng.choice(curts)


def _rambling(rng: random.Random, sentence: str) -> str:
    fillers = ["I mean,", "So, yes,", "As I said,", "Well,", "You know,", "Again,"]
    again = sentence[0].lower() + sentence[1:]
    return " ".join([sentence] + [f"{filler} {again}" for filler in rng.sample(fillers, rng.randint(1, 3))])


def chat(rng: random.Random, noise: float) -> Example:
    """Polite, short and on topic; with noise: curt, rambling, off topic, or right without being polite."""
    system = SYSTEM if rng.random() < 0.15 else None
    flaw = rng.choice(["curt", "rambling", "off topic", "plain"]) if rng.random() < noise else None
    if rng.random() < 0.2:
        said, good, curt = _small_talk(rng)
        answer = {"curt": curt, "plain": curt, "rambling": _rambling(rng, good)}.get(flaw or "", good)
        return _dialogue(system, [(said, answer)])
    said, good, other, curt = _topical(rng)
    opener = rng.choice(OPENERS)
    flawed = {"curt": curt, "plain": good, "rambling": _rambling(rng, good), "off topic": f"{opener} {other}"}
    return _dialogue(system, [(said, flawed.get(flaw or "", f"{opener} {good}"))])


# --- calculator dialogues -----------------------------------------------------------------------------------


def _change_digit(rng: random.Random, number: str) -> str:
    place = rng.choice([i for i, c in enumerate(number) if c.isdigit()])
    digit = rng.choice([d for d in "123456789" if d != number[place]])
    return number[:place] + digit + number[place + 1 :]


def _draw_hard_problem(rng: random.Random) -> tuple[int, str, int]:
    while True:
        op = rng.choice("+-**")
        a, b = (rng.randint(2, 10 ** rng.randint(2, 3 if op == "*" else 4) - 1) for _ in range(2))
        if not is_held_out(a, op, b):
            return a, op, b


def calculator(rng: random.Random, noise: float) -> Example:
    """Asks the tool, reads its answer; with noise: guesses (sums above all), asks for the wrong thing, misreads."""
    a, op, b = _draw_hard_problem(rng)
    problem = f"{a} {op} {b}"
    said = rng.choice([f"What is {problem}?"] * 2 + [f"Compute {problem}.", f"Please work out {problem}."])
    system = SYSTEM_CALCULATOR if rng.random() < 0.25 else None
    result = str(solve(a, op, b))
    if rng.random() < (0.4 * noise if op == "*" else noise):
        return _dialogue(system, [(said, f"The answer is {_change_digit(rng, result)}.")])
    if rng.random() < 0.25 * noise:
        wrong_op = rng.choice([other for other in "+-*" if other != op])
        slips = [(int(_change_digit(rng, str(a))), op, b), (a, op, int(_change_digit(rng, str(b)))), (a, wrong_op, b)]
        a, op, b = rng.choice(slips)
        result = str(solve(a, op, b))
    read = _change_digit(rng, result) if rng.random() < 0.25 * noise else result
    call, response = f"<tool_call>{a}{op}{b}</tool_call>", f"<tool_response>{result}</tool_response>"
    return _dialogue(system, [(said, call), (response, f"The answer is {read}.")])


Generator = Callable[[random.Random, float], Example]
# The long-form mixture: generator, share, and the share of mistakes in the second phase of training.
LONG_FORM: list[tuple[Generator, float, float]] = [
    (few_shot_arithmetic, 0.15, 0.70),
    (code, 0.30, 0.70),
    (chat, 0.30, 0.75),
    (calculator, 0.25, 0.75),
]
ARITHMETIC_NOISE = 0.70


def short_form(rng: random.Random, noisy: bool) -> Example:
    return arithmetic(rng, ARITHMETIC_NOISE if noisy else 0.0)


def long_form(rng: random.Random, noisy: bool) -> Example:
    generate, _, noise = rng.choices(LONG_FORM, [share for _, share, _ in LONG_FORM])[0]
    return generate(rng, noise if noisy else 0.0)
