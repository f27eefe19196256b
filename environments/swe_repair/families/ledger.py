"""Ledgers of accounts."""

from ..library import Family

FEES = '''
"""Fees and interest, in whole cents."""


def $fee(cents):
    """Return the fee of a transfer: $percent percent, rounded up."""  #: up
    """Return the fee of a transfer: $percent percent, rounded down."""  #: !up
    charged = -(-cents * $percent // 100)  #: up
    charged = cents * $percent // 100  #: !up
    return max(charged, $least)  #: least
    return charged  #: !least


def interest(cents, days):
    """Return the interest of some days: one in a thousand a day, rounded down; none for debts."""
    if cents <= 0:
        return 0
    return cents * days // 1000


def split(cents, shares):
    """Divide an amount by shares; what is left over goes to the first, one cent each."""
    whole = sum(shares)
    parts = [cents * share // whole for share in shares]
    for place in range(cents - sum(parts)):
        parts[place] += 1
    return parts
'''
BOOK = '''
"""The ledger."""

from .fees import $fee, interest, split


class Refused(Exception):
    """A posting is not possible."""


class $Ledger:
    """Accounts with their postings."""

    def __init__(self, credit=0):
        self.credit = credit
        self._postings = []
        self._accounts = []

    def open(self, name):
        """Open an account."""
        name = name.strip().lower()  #: fold
        if name in self._accounts:
            raise Refused("the account exists")
        self._accounts.append(name)

    def $deposit(self, day, name, cents):
        """Pay in."""
        if cents <= 0:
            raise Refused("the amount is positive")
        self._post(day, name, cents, "in")

    def $transfer(self, day, source, target, cents):
        """Move an amount; the source also pays the fee."""  #: payer
        """Move an amount; the fee is taken from what arrives."""  #: !payer
        charged = $fee(cents)
        leaving = cents + charged  #: payer
        leaving = cents  #: !payer
        if cents <= 0 or self.balance(source, day) + self.credit < leaving:
            raise Refused("there is not enough")
        self._post(day, source, -leaving, "to " + target)
        self._post(day, target, cents, "from " + source)  #: payer
        self._post(day, target, cents - charged, "from " + source)  #: !payer

    def _post(self, day, name, cents, text):
        name = name.strip().lower()  #: fold
        if name not in self._accounts:
            raise Refused("there is no such account")
        self._postings.append((day, name, cents, text))

    def balance(self, name, day=None):
        """Return the balance at the end of a day, or of all days."""
        name = name.strip().lower()  #: fold
        return sum(
            cents for when, who, cents, _ in self._postings if who == name and (day is None or when <= day)
        )

    def $statement(self, name, first, last):
        """Return day, amount and balance after each posting of the days from first to last."""
        running = self.balance(name, first - 1)
        lines = []
        for when, who, cents, _ in sorted(self._postings, key=lambda posting: posting[0]):
            if who == name and first <= when <= last:
                running += cents
                lines.append([when, cents, running])
        return lines  #: !recent
        return lines[::-1]  #: recent

    def earned(self, name, first, last):
        """Return the interest of the balances at the end of each day."""
        return sum(interest(self.balance(name, day), 1) for day in range(first, last + 1))

    def share(self, day, source, targets):
        """Divide the whole balance of an account among others by their shares, without a fee."""
        cents = self.balance(source, day)
        if cents <= 0:
            raise Refused("there is nothing to divide")
        for target, part in zip(targets, split(cents, list(targets.values()))):
            self._post(day, target, part, "share")
        self._post(day, source, -cents, "shared")

    def totals(self):
        """Return name and balance of each account, by name."""
        found = [[name, self.balance(name)] for name in sorted(self._accounts)]
        return [pair for pair in found if pair[1] != 0]  #: skip
        return found  #: !skip
'''


def case(rng, on, n):
    names = ("ann", "bob", "cleo")
    lines = [f"b = {n['Ledger']}({rng.choice(('', 'credit=50', 'credit=300'))})"]
    lines += [f"b.open({name!r})" for name in names]
    days = [rng.randint(1, 9) for _ in range(rng.randint(3, 5))]
    for day in days:
        lines.append(f"b.{n['deposit']}({day}, {rng.choice(names)!r}, {rng.randint(1, 1500)})")
    lines.append(f"b.{n['deposit']}(2, 'ann', {rng.choice((400, 995, 1000, 1001))})")
    source, target = rng.sample(names, 2)
    if rng.random() < 0.15:
        source = source.upper()
    move = f"b.{n['transfer']}({rng.randint(3, 9)}, {source!r}, {target!r}, {rng.choice((rng.randint(1, 300), rng.randint(200, 1200)))})"
    first, last = rng.randint(1, 5), rng.randint(4, 9)
    kind = rng.choice(
        (
            "totals",
            "transfer",
            "transfer",
            "statement",
            "earned",
            "share",
            "balance",
            "fee",
            "split",
            "refuse",
        )
    )
    if kind == "totals":
        return "listing the totals", "\n".join([*lines[:-2], "b.totals()"])
    if kind == "transfer":
        return "moving money", "\n".join(
            [*lines, move, f"[b.totals(), b.{n['statement']}({target!r}, 1, 9)]"]
        )
    if kind == "statement":
        return "asking for a statement", "\n".join(
            [*lines, f"b.{n['statement']}({target!r}, {first}, {last})"]
        )
    if kind == "earned":
        return "interest is computed", "\n".join([*lines, f"b.earned('ann', {first}, {last})"])
    if kind == "share":
        shares = {name: rng.randint(1, 4) for name in names if name != "ann"}
        return "dividing a balance", "\n".join([*lines, f"b.share({last}, 'ann', {shares})", "b.totals()"])
    if kind == "balance":
        return "asking for the balance of a day", "\n".join(
            [*lines, f"[b.balance({target!r}, d) for d in range(10)]"]
        )
    if kind == "fee":
        return (
            "computing fees",
            f"[{n['fee']}(c) for c in ({rng.randint(1, 99)}, {rng.randint(100, 900)}, {rng.randint(10, 99)}00)]",
        )
    if kind == "split":
        return (
            "splitting an amount",
            f"split({rng.randint(10, 999)}, {[rng.randint(1, 5) for _ in range(rng.randint(2, 4))]})",
        )
    bad = rng.choice(
        (
            "b.open('Ann')",
            "b.open('bob ')",
            f"b.{n['deposit']}(1, 'dan', 5)",
            f"b.{n['deposit']}(1, 'bob', 0)",
        )
    )
    return "something unusual is asked for", "\n".join([*lines, bad, "b.totals()"])


FAMILY = Family(
    name="ledger",
    summary="Accounts in whole cents, with fees, interest and statements.",
    options=("up", "least", "payer", "recent", "fold", "skip"),
    names={
        "pkg": ("ledger", "accounts", "bookkeeping"),
        "Ledger": ("Ledger", "Book", "Bank"),
        "fee": ("fee", "charge"),
        "deposit": ("deposit", "pay_in"),
        "transfer": ("transfer", "move", "send"),
        "statement": ("statement", "postings"),
        "percent": (2, 3, 5),
        "least": (4, 10),
    },
    modules={"fees": FEES, "book": BOOK},
    rules="""
- A transfer costs $percent percent, rounded up to whole cents.  #: up
- A transfer costs $percent percent, rounded down to whole cents.  #: !up
- A fee is at least $least cents.  #: least
- The fee is paid by the source, on top of the amount.  #: payer
- The fee is taken from what arrives at the target.  #: !payer
- A transfer is refused (Refused) if its amount is not positive, or the source's balance of that day and the
  credit do not cover all that leaves it. The last cent can be spent.
- Names of accounts are the same in upper and lower case and with blanks around them.  #: fold
- Names of accounts are taken as they are.  #: !fold
- Unknown accounts, accounts that exist already, and deposits that are not positive are refused.
- A balance of a day includes the postings of that day.
- A statement has day, amount and balance after each posting of the first to the last day, in the order of days.  #: !recent
- A statement has day, amount and balance after each posting of the first to the last day, the latest first.  #: recent
- Interest is a thousandth of the balance at the end of each day, rounded down for each day; none for debts.
- An amount is split by shares, rounded down; cents left over go to the first, one each. Nothing can be split of an
  account that is not above zero.
- Totals are listed by name; accounts at zero are left out.  #: skip
- Totals are listed by name; accounts at zero too.  #: !skip
""",
    case=case,
)
