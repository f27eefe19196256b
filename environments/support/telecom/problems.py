"""The problems of the operator: requests of customers, the desk's solution, and the facts to tell."""

from __future__ import annotations

from collections.abc import Sequence

from ..problem import IDENTITY, Problem, Problems, Request, Step, ask, call, facts_told, tell
from ..records import cents, money, written
from ..tools import DeskTools
from .draws import draw, new_plan, overdue, wanted_gb
from .phone import RIGHT, TROUBLES, Phone, seen
from .records import MONTHS, NEXT_MONTH, TELECOM, double_item, last_refund_day
from .tools import TelecomTools

KINDS = {
    1: ("plan", "data", "pay", "suspend", "cheaper", "owing", "ended", "phone"),
    2: ("plan", "data", "sim", "refund", "resume", "cheaper", "owing", "phone", "trouble"),
    3: (
        "plan", "data", "pay", "suspend", "sim", "roaming", "refund", "resume", "cheaper", "owing", "ended",
        "late", "phone", "trouble", "both",
    ),
}  # fmt: skip
OPENINGS = {
    "plan": ("I would like another plan for {line}.", "Please change {line} to another plan."),
    "data": ("I need more data this month for {line}.", "Please add data to {line}."),
    "pay": (
        "I would like to pay what is overdue for {line}.",
        "I have not paid for {line}. I want to do it now.",
    ),
    "suspend": ("Please suspend {line}.", "I would like to have {line} suspended."),
    "sim": ("I need a new SIM card for {line}.", "Please send me a new SIM card for {line}."),
    "roaming": (
        "I am going abroad. Please turn on roaming for {line}.",
        "I will be abroad next week and need roaming for {line}.",
    ),
    "refund": (
        "A bill of {line} has the same item twice. I would like the money for one of them back.",
        "I have been charged twice for the same thing on a bill of {line}. Please refund it.",
    ),
    "resume": ("Please make {line} active again.", "{Line} is suspended. I would like to use it again."),
    "calls": (
        "My {label} has no service: I can neither call nor go online with it.",
        "I can neither make calls nor go online with my {label}.",
    ),
    "internet": (
        "Without Wi-Fi, my {label} has no internet. Calls work.",
        "The mobile internet does not work on my {label}. I can make calls.",
    ),
    "abroad": (
        "I am in {place}, and the mobile internet does not work on my {label}. Calls work.",
        "My {label} has no mobile internet here in {place}. I can make calls.",
    ),
    "slow": (
        "The mobile internet on my {label} has become very slow.",
        "Web pages take very long on my {label} when I am not on Wi-Fi.",
    ),
}
WISHES = {"cheaper": "plan", "late": "refund", "ended": "resume"}
"""The request in the words of a refusal, by its kind."""
ASK = {
    "plan": "Which plan would you like for your {label}?",
    "amount": "How many GB should I add for your {label}?",
    "bill": "Which bill of your {label} is it?",
    "bills": "Which overdue bills of your {label} do you mean?",
    "payment": "Which should I use for your {label}, your card or your bank account?",
    "pay_now": "Bills for your {label} are overdue. Would you like to pay them now, by card or from your "
    "bank account?",
    "reason": "What is the reason for suspending the line of your {label}?",
    "sim": "What happened to the old SIM card of your {label}?",
    "address": "To which address should the new SIM card for your {label} go?",
}
SUSPEND = {"lost": "It is lost.", "stolen": "It has been stolen.", "travel": "I am going on a long journey."}
SIM = {"lost": "The old one is lost.", "damaged": "The old one is damaged."}
NOT_TODAY = "I do not want to pay anything today."
QUESTIONS = {
    "airplane mode": "Is airplane mode on?",
    "SIM card": "Is the SIM card in place?",
    "SIM lock": "Does the phone ask for a PUK?",
    "network selection": "Is the network selection automatic or manual?",
    "mobile data": "Is mobile data on?",
    "access point": "Which access point is set in the phone?",
    "data roaming": "Is data roaming on in the phone?",
    "data saver": "Is data saver on?",
    "network mode": "Which network mode is set?",
    "VPN": "Is a VPN on?",
}
MEND = {
    "airplane mode": "Please turn off airplane mode.",
    "SIM card": "Please take the SIM card out and put it back. Then restart the phone.",
    "SIM lock": "Please enter the PUK {puk}.",
    "network selection": "Please set the network selection to automatic.",
    "mobile data": "Please turn on mobile data.",
    "access point": "Please set the access point to {point}. Then restart the phone.",
    "data roaming": "Please turn on data roaming in the phone.",
    "data saver": "Please turn off data saver.",
    "network mode": "Please set the network mode to 5G.",
    "VPN": "Please turn off the VPN.",
}
TOPICS = {
    **IDENTITY,
    "line": r"\bnumber\b|(which|what) (line|phone|device)\b",
    "plan": r"\bplans?\b|\btariffs?\b",
    "amount": r"how (many|much)|\bgb\b|gigabyte|amount of data",
    "bill": r"\b(which|what)\b[^.?!]*\b(bills?|months?|invoices?)\b|\bmonth\b",
    "payment": r"\bpay(ing|ment)?s?\b|(?<!sim )\bcards?\b(?! for)|\bbank\b|\bmethods?\b",
    "reason": r"\breasons?\b|\bwhy\b|\bhappened\b|\b(lost|stolen|damaged)\b",
    "address": r"(?<!mail )\baddress\b|where (should|shall|do) ",
    "place": r"\babroad\b|where are you|\bcountry\b",
}
"""Topics of a question, as regular expressions."""
ACTIONS = (
    "add|turn|activat|reactivat|enabl|suspend|block|resum|refund|order|paid|pay|tak|set|switch|charg|book"
)
INSTRUCTIONS = """\
You are {first} {last}, a customer of a mobile operator. You write to its support desk.
{identity}
You have a phone. Your tools show its settings and change them. Look and change only what the desk asks for, \
and report what you see. If the desk says that the phone should work, test it.
Make these requests one after another. Make the next one when the last one is settled or refused:
{requests}
Accept it if the desk refuses a request. After the last request, say goodbye."""


class TelecomProblem(Problem):
    """A problem of the operator."""

    tools = TelecomTools
    topics = TOPICS
    actions = ACTIONS
    instructions = INSTRUCTIONS

    def device(self, desk: DeskTools) -> Phone:
        wish = next((wish for wish in self.data["requests"] if "phone" in wish), None)
        if wish is None or not isinstance(desk, TelecomTools):
            return Phone(RIGHT, complaint="", account=None, abroad=False)

        def account() -> dict:
            return desk.line(wish["line"])

        complaint = wish["complaint"]
        return Phone(wish["phone"], complaint=complaint, account=account, abroad=complaint == "abroad")

    def request(self, number: int, wish: dict) -> Request:
        kind, line = wish["kind"], TELECOM["lines"][wish["line"]]
        topic = wish.get("complaint") or WISHES.get(kind) or wish.get("wish") or kind
        which = f"line {line['number']}" if self.level == 1 else f"the line of my {line['label']}"
        opening = OPENINGS[topic][self.data["style"] % 2].format(
            line=which, Line=which[0].upper() + which[1:], label=line["label"], place=wish.get("place")
        )
        facts = {"line": f"I do not know the number. It is my {line['label']}."}
        steps = self._lookups(number, line)
        getattr(self, f"_{'phone' if 'phone' in wish else kind}")(wish, line, facts, steps)
        told = facts_told(steps)
        if self.level == 1:  # everything at once
            facts["line"] = f"The number is {line['number']}."
            steps = [step for step in steps if step.kind != "ask"]
            shown = [text for topic, text in facts.items() if topic not in ("line", "place")]
            if "phone" in wish:
                (fault,) = faults_of(wish)
                looked = as_part(seen(fault, wish["phone"][fault]))
                shown = [facts["line"], f"I have looked at the phone: {looked}"]
            opening = " ".join([opening, *shown, self.identity])
        return Request(opening, facts, steps, told, on_device="phone" in wish)

    def _lookups(self, number: int, line: dict) -> list[Step]:
        """Return the calls that find the customer and the line."""
        steps = []
        if number == 0:
            steps = self.identify()
            steps.append(call("get_customer", customer_id=self.customer["customer_id"]))
        return [*steps, call("get_line", number=line["number"])]

    def _ask(self, name: str, line: dict, topic: str = "") -> Step:
        return ask(topic or name, ASK[name].format(label=line["label"]))

    def _payment(self, wish: dict) -> str:
        """Return the id of the wanted payment method."""
        methods = self.customer["payment_methods"]
        return next(method["payment_id"] for method in methods if method["kind"] == wish["payment"])

    def _plan(self, wish, line, facts, steps):
        facts["plan"] = plan_text(wish["plan"])
        plan = new_plan(wish["plan"], line)
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("plan", line),
            call("list_plans"),
            call("change_plan", number=line["number"], plan_id=plan["plan_id"]),
            tell(
                f"The plan of your {line['label']} has been changed to {plan['name']} from {NEXT_MONTH} on. "
                f"It costs {plan['price']} a month.",
                plan["price"],
            ),
        ]

    def _cheaper(self, wish, line, facts, steps):
        facts["plan"] = plan_text(wish["plan"])
        last = line["contract"]["minimum_until"]
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("plan", line),
            call("list_plans"),
            tell(f"I cannot change to a cheaper plan yet: the minimum term lasts until {last}.", last),
        ]

    def _data(self, wish, line, facts, steps):
        facts["amount"] = data_text(wish)
        steps += [call("get_bills", number=line["number"]), self._ask("amount", line)]
        steps.append(
            tell(self._add_data(wanted_gb(wish, line), line, steps), price_of(wanted_gb(wish, line), line))
        )

    def _add_data(self, gb: int, line: dict, steps: list[Step]) -> str:
        """Add the steps that add data, and return the message about them."""
        steps += [call("list_plans"), call("add_data", number=line["number"], gb=gb)]
        return f"I have added {gb} GB to the line of your {line['label']}. They cost {price_of(gb, line)}."

    def _pay(self, wish, line, facts, steps):
        facts["bill"] = "Only the oldest one, please." if wish["oldest"] else "All that are overdue."
        facts["payment"] = f"Please use my {wish['payment']}."
        bills = overdue(line)[: 1 if wish["oldest"] else None]
        steps += [call("get_bills", number=line["number"]), self._ask("bills", line, "bill")]
        total = self._take(wish, line, bills, "payment", steps)
        steps.append(tell(f"The payment of {total} for your {line['label']} has been taken.", total))

    def _take(self, wish: dict, line: dict, bills: Sequence[dict], question: str, steps: list[Step]) -> str:
        """Add the steps that take the payment of some bills, and return the amount."""
        names = [bill["bill_id"] for bill in bills]
        steps += [
            self._ask(question, line, "payment"),
            call("take_payment", bill_ids=names, payment_id=self._payment(wish)),
        ]
        return total_of(bills)

    def _suspend(self, wish, line, facts, steps):
        facts["reason"] = SUSPEND[wish["reason"]]
        price = plan_of(line)["price"]
        steps += [
            self._ask("reason", line),
            call("list_plans"),
            call("suspend_line", number=line["number"], reason=wish["reason"]),
            tell(
                f"The line of your {line['label']} has been suspended. {price} a month is still due for it.",
                price,
            ),
        ]

    def _sim(self, wish, line, facts, steps):
        facts["reason"] = SIM[wish["reason"]]
        facts["address"] = f"Please send it to {written(wish['address'])}."
        price = plan_of(line)["sim_price"]
        given = {"number": line["number"], "reason": wish["reason"], "address": wish["address"]}
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("sim", line, "reason"),
            self._ask("address", line),
            call("list_plans"),
            call("order_sim", **given),
            tell(f"A new SIM card for your {line['label']} has been ordered. It costs {price}.", price),
        ]

    def _roaming(self, wish, line, facts, steps):
        steps.append(call("get_bills", number=line["number"]))
        text = self._turn_on_roaming(line, steps)
        steps.append(tell(text, plan_of(line)["abroad"]["price_per_day"]))

    def _turn_on_roaming(self, line: dict, steps: list[Step]) -> str:
        """Add the steps that turn on roaming, and return the message about them."""
        steps += [call("list_plans"), call("set_roaming", number=line["number"], on=True)]
        price = plan_of(line)["abroad"]["price_per_day"]
        return f"Roaming is now on for the line of your {line['label']}. It costs {price} a day."

    def _refund(self, wish, line, facts, steps):
        bill = self._double(wish, facts)
        amount = double_item(bill)["amount"]
        given = {"bill_id": bill["bill_id"], "amount": amount, "refund_to": self._payment(wish)}
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("bill", line),
            self._ask("payment", line),
            call("refund", **given),
            tell(f"You get back {amount}. The refund for your {line['label']} has been sent.", amount),
        ]

    def _late(self, wish, line, facts, steps):
        last = last_refund_day(self._double(wish, facts))
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("bill", line),
            tell(f"I cannot refund that item any more: the last day for it was {last}.", last),
        ]

    def _double(self, wish: dict, facts: dict[str, str]) -> dict:
        """Return the bill that has an item twice."""
        bill = TELECOM["bills"][wish["bill"]]
        facts["bill"] = f"It is the bill of {MONTHS[bill['month']]}."
        facts["payment"] = f"The refund should go to my {wish['payment']}."
        return bill

    def _resume(self, wish, line, facts, steps):
        steps.append(call("get_bills", number=line["number"]))
        text, total = f"The line of your {line['label']} has been made active again.", ""
        if overdue(line):
            facts["payment"] = f"Please use my {wish['payment']} for what is overdue."
            total = self._take(wish, line, overdue(line), "pay_now", steps)
            text = f"I have taken the payment of {total}. {text}"
        steps += [call("resume_line", number=line["number"]), tell(text, total)]

    def _ended(self, wish, line, facts, steps):
        last = line["contract"]["ends_on"]
        steps.append(tell(f"I cannot resume that line, because its contract ended on {last}.", last))

    def _owing(self, wish, line, facts, steps):
        if wish["wish"] == "data":
            facts["amount"] = data_text(wish)
        if wish["wish"] == "sim":
            facts["reason"] = SIM[wish["reason"]]
            facts["address"] = f"Please send it to {written(wish['address'])}."
        facts["payment"] = NOT_TODAY
        total = total_of(overdue(line))
        steps += [
            call("get_bills", number=line["number"]),
            self._ask("pay_now", line, "payment"),
            tell(f"I cannot do that for your {line['label']} as long as {total} is overdue.", total),
        ]

    def _phone(self, wish, line, facts, steps):
        """Fix the fault of the account, if there is one, and then the faults of the phone."""
        settings = TROUBLES[wish["complaint"]].settings
        faults = faults_of(wish)
        facts["place"] = f"I am in {wish['place']}." if "place" in wish else "I am at home."
        done, fact = "", ""
        if wish["kind"] != "phone":
            done, fact = self._mend_account(wish, line, facts, steps)
        elif self.level > 1:
            steps.append(call("get_bills", number=line["number"]))
        last = ""
        for setting in settings if faults else ():
            steps.append(ask(setting, QUESTIONS[setting]))
            if setting in faults:
                last = MEND[setting].format(puk=line["sim"]["puk"], point=settings.get("access point"))
                if setting == faults[-1]:
                    break
                steps.append(tell(last))
        steps.append(tell(" ".join(part for part in (done, last, "Does it work now?") if part), fact))

    def _mend_account(self, wish, line, facts, steps) -> tuple[str, str]:
        """Add the steps that fix the fault of an account. Return the message about them and its fact."""
        if wish["complaint"] == "abroad":
            steps.append(call("get_bills", number=line["number"]))
            return self._turn_on_roaming(line, steps), plan_of(line)["abroad"]["price_per_day"]
        if wish["complaint"] == "slow":
            facts["amount"] = data_text(wish)
            steps += [call("get_bills", number=line["number"]), self._ask("amount", line)]
            gb = wanted_gb(wish, line)
            return self._add_data(gb, line, steps), price_of(gb, line)
        facts["payment"] = f"Please use my {wish['payment']} for what is overdue."
        steps.append(call("get_bills", number=line["number"]))
        total = self._take(wish, line, overdue(line), "pay_now", steps)
        steps.append(call("resume_line", number=line["number"]))
        return f"I have taken the payment of {total}, and the line is active again.", total


def faults_of(wish: dict) -> list[str]:
    """Return the settings of a phone that cause the complaint, in the order of the desk's questions."""
    settings = TROUBLES[wish["complaint"]].settings
    return [setting for setting, value in settings.items() if wish["phone"][setting] != value]


def plan_of(line: dict) -> dict:
    """Return the plan of a line."""
    return TELECOM["plans"][line["plan_id"]]


def price_of(gb: int, line: dict) -> str:
    """Return the price of added data."""
    return money(gb * cents(plan_of(line)["price_per_gb"]))


def total_of(bills: Sequence[dict]) -> str:
    """Return the amount of some bills."""
    return money(sum(cents(bill["amount"]) for bill in bills))


def plan_text(wish: dict) -> str:
    """Return the customer's description of the wanted plan."""
    if "plan_id" in wish:
        return f"I would like the plan {TELECOM['plans'][wish['plan_id']]['name']}."
    abroad = " that includes use abroad" if wish["abroad"] else ""
    return f"I would like the cheapest plan{abroad} with at least {wish['at_least']} GB."


def data_text(wish: dict) -> str:
    """Return the customer's description of the wanted data."""
    if "left" in wish:
        return f"I want to have exactly {wish['left']} GB left this month. Please add what is missing."
    return f"Please add {wish['gb']} GB."


def as_part(sentence: str) -> str:
    """Return a sentence in the form that continues another sentence."""
    return sentence if sentence.startswith(("SIM", "VPN", "Wi-Fi")) else sentence[0].lower() + sentence[1:]


def problems(split: str, level: int) -> Problems:
    """Return the samples of "train" or "test" at a level."""
    return Problems(split, level, dict(enumerate(TELECOM["customers"])), draw_kinds)


def draw_kinds(customer_id: str, level: int, rng) -> list[dict] | None:
    """Return requests of a customer, or None if a draw is impossible."""
    return draw(customer_id, KINDS[level], level, rng)
