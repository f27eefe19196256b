"""Calculators: tokens, and values of expressions."""

from ..library import Family

TOKENS = '''
"""Tokens of an expression."""

SIGNS = "+-*/%^()=,"


class SyntaxProblem(ValueError):
    """The text is no expression."""


def tokens(text):
    """Return the numbers, names and signs of a text."""
    text = text.split("#")[0]  #: comments
    found, place = [], 0
    while place < len(text):
        char = text[place]
        if char.isspace():
            place += 1
            continue
        end = place + 1
        if char.isdigit():
            while end < len(text) and (text[end].isdigit() or text[end] == "_"):  #: groups
            while end < len(text) and text[end].isdigit():  #: !groups
                end += 1
            found.append(int(text[place:end].replace("_", "")))  #: groups
            found.append(int(text[place:end]))  #: !groups
        elif char.isalpha():
            while end < len(text) and text[end].isalnum():
                end += 1
            found.append(text[place:end].lower())  #: fold
            found.append(text[place:end])  #: !fold
        elif char in SIGNS:
            found.append(char)
        else:
            raise SyntaxProblem(f"{char!r} at {place} is not expected")
        place = end
    return found
'''
VALUES = '''
"""Values of expressions."""

from .tokens import SyntaxProblem, tokens


class $Calc:
    """Computes expressions of whole numbers, and remembers names."""

    def __init__(self):
        self.names = {}
        self.history = []
        self._tokens = []

    def $run(self, text):
        """Return the value of an expression; ``name = expression`` also remembers it."""
        self._tokens = tokens(text)
        name = None
        if len(self._tokens) > 1 and self._tokens[1] == "=":
            name = self._tokens[0]
            self._tokens = self._tokens[2:]
        value = self._sum()
        if self._tokens:
            raise SyntaxProblem(f"{self._tokens[0]!r} is not expected")
        if name is not None:
            self.names[name] = value
        self.history.append(value)
        self.history = self.history[-$kept:]
        return value

    def _next(self, signs):
        if self._tokens and isinstance(self._tokens[0], str) and self._tokens[0] in signs:
            return self._tokens.pop(0)
        return None

    def _sum(self):
        value = self._product()
        while sign := self._next(("+", "-")):
            other = self._product()
            value = value + other if sign == "+" else value - other
        return value

    def _product(self):
        value = self._power()
        while sign := self._next(("*", "/", "%")):
            other = self._power()
            if sign == "*":
                value = value * other
                continue
            if other == 0:
                raise ZeroDivisionError("division by zero")
            if sign == "%":
                value = value % other
            else:
                value = value // other  #: floor
                value = abs(value) // abs(other) * (1 if (value < 0) == (other < 0) else -1)  #: !floor
        return value

    def _power(self):
        """Read a base and its exponents, from right to left."""  #: right
        """Read a base and its exponents, from left to right."""  #: !right
        value = self._atom()
        if self._next(("^",)):  #: right
            return self._raised(value, self._power())  #: right
        while self._next(("^",)):  #: !right
            value = self._raised(value, self._atom())  #: !right
        return value

    def _raised(self, base, exponent):
        if exponent < 0 or exponent > $highest:
            raise ValueError("the exponent is out of range")
        return base**exponent

    def _atom(self):
        if self._next(("-",)):
            return -self._atom()
        if self._next(("(",)):
            value = self._sum()
            if not self._next((")",)):
                raise SyntaxProblem("a ) is missing")
            return value
        if not self._tokens:
            raise SyntaxProblem("the expression has no end")
        token = self._tokens.pop(0)
        if isinstance(token, int):
            return token
        if token == "last" and self.history:
            return self.history[-1]
        if token in self.names:
            return self.names[token]
        if token.isalpha():  #: zero
            return 0  #: zero
        raise SyntaxProblem(f"{token!r} is not expected")
'''


def case(rng, on, n):
    def atom():
        return rng.choice(
            (str(rng.randint(0, 9)), str(rng.randint(1, 30)), "x", "y", f"-{rng.randint(1, 9)}")
        )

    def text(depth=2):
        if depth == 0 or rng.random() < 0.15:
            return atom()
        sign = rng.choice("+-*/%+-")
        inner = f"{text(depth - 1)} {sign} {text(depth - 1)}"
        return f"({inner})" if rng.random() < 0.4 else inner

    start = f"c = {n['Calc']}()\nc.{n['run']}('x = {rng.randint(2, 9)}')\nc.{n['run']}('y = {rng.randint(-9, -1)}')\n"
    run = f"c.{n['run']}"
    kind = rng.choice(
        ("plain", "plain", "power", "division", "names", "case", "comment", "group", "bad", "last", "tokens")
    )
    if kind == "power":
        a, b, c = rng.randint(2, 3), rng.randint(1, 3), rng.randint(0, 2)
        e = rng.choice(
            (f"{a} ^ {b} ^ {c}", f"-{a} ^ {b}", f"{b + 1} * {a} ^ {b}", f"{a} ^ {rng.randint(-1, 12)}")
        )
        return "using powers", f"{start}{run}({e!r})"
    if kind == "division":
        a, b = rng.randint(-40, 40), rng.randint(-6, 6)
        return "dividing", f"{start}[{run}('{a} / ({b})'), {run}('({a}) % {abs(b)}')]"
    if kind == "names":
        return "using names", f"{start}{run}('z = {text()}')\n[{run}('z - {text(1)}'), c.names]"
    if kind == "case":
        return (
            "names have capital letters",
            f"{start}{run}('Big = {rng.randint(1, 99)}')\n[{run}('big + X'), c.names]",
        )
    if kind == "comment":
        return "a text has a number sign", f"{start}{run}('{text(1)} # {atom()}')"
    if kind == "group":
        return (
            "numbers have underscores",
            f"{start}{run}('{rng.randint(1, 9)}_{rng.randint(100, 999)} + {text(1)}')",
        )
    if kind == "bad":
        bad = rng.choice((f"({text(1)}", f"{text(1)})", f"{text(1)} +", f"{text(1)} 3", "", "2 $ 3", "q + 2"))
        return "a text is unusual", f"{start}{run}({bad!r})"
    if kind == "last":
        runs = "\n".join(f"{run}({text(1)!r})" for _ in range(rng.randint(1, 4)))
        return "looking back", f"{start}{runs}\n[{run}('last * 2'), c.history]"
    if kind == "tokens":
        return (
            "reading tokens",
            f"tokens({(text(1) + rng.choice((' ', '  ', '')) + rng.choice(('Ab1', '=4', '^2', '#1')))!r})",
        )
    return "computing", f"{start}{run}({text()!r})"


FAMILY = Family(
    name="calc",
    summary="A calculator of whole numbers with names.",
    options=("comments", "groups", "fold", "floor", "right", "zero"),
    names={
        "pkg": ("calc", "abacus", "reckon"),
        "Calc": ("Calculator", "Calc", "Desk"),
        "run": ("run", "compute", "value"),
        "kept": (3, 4, 5),
        "highest": (6, 8, 10),
    },
    modules={"tokens": TOKENS, "values": VALUES},
    rules="""
- Numbers are whole and may have _ between digits.  #: groups
- Numbers are whole and have digits alone.  #: !groups
- Names begin with a letter, then letters and digits; upper and lower case are the same.  #: fold
- Names begin with a letter, then letters and digits; upper and lower case differ.  #: !fold
- What follows # is ignored.  #: comments
- Signs are + - * / % ^ ( ) = and ,. Anything else raises SyntaxProblem, as does an expression that is not complete.
- A minus before a number, a name or a parenthesis binds most strongly; then ^, then * / %, then + and -.
- Equal signs are computed from left to right, but ^ from right to left.  #: right
- Equal signs are computed from left to right, ^ too.  #: !right
- / rounds down.  #: floor
- / cuts off the fraction, so that -7 / 2 is -3.  #: !floor
- % has the sign of the divisor, as in Python. Division by zero raises ZeroDivisionError.
- An exponent is from 0 to $highest, else ValueError is raised.
- An unknown name is 0.  #: zero
- An unknown name raises SyntaxProblem.  #: !zero
- last is the value before, and history has the last $kept values.
""",
    case=case,
)
