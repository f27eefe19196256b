"""The questions of levels 2 and 3, each with the query that answers it."""

from __future__ import annotations

import random
import re
from itertools import combinations, permutations, product

GOODS = {
    "food": ("bread", "honey", "rice", "tea", "cheese", "salt"),
    "tools": ("hammer", "saw", "drill", "wrench", "ladder", "rake"),
    "toys": ("puzzle", "kite", "doll", "robot", "marble", "yoyo"),
    "clothes": ("coat", "belt", "glove", "cap", "boot", "vest"),
    "garden": ("fern", "pot", "hose", "bench", "seed", "hedge"),
    "music": ("drum", "flute", "violin", "harp", "horn", "banjo"),
}
"""Departments, each with its own database, and the goods that suit them."""
COLUMNS = ("price", "stock", "weight", "length")
MOST_AND_LEAST = {
    "price": ("highest", "lowest"),
    "stock": ("largest", "smallest"),
    "weight": ("greatest", "smallest"),
    "length": ("greatest", "smallest"),
}
"""Column -> the adjectives of its highest and its lowest value."""
CUSTOMERS = ("Ann", "Bob", "Cleo", "Dan", "Eve", "Finn")
BOUNDS = range(14, 26)
"""Numbers in conditions. Columns have values from 10 to 29."""
EXTREMES = {
    "cheapest": "price",
    "most expensive": "price DESC",
    "lightest": "weight",
    "heaviest": "weight DESC",
    "shortest": "length",
    "longest": "length DESC",
}
"""Adjective -> the order of goods that puts the described one first."""
MOST = 1_500
"""Maximum number of questions of one form."""
TEST_SHARE = 4
"""One in this many questions of each form is in the test split."""

Words = dict[str, object]
"""Values for the blanks of a form. The order follows from the adjective."""


def _each(**fields) -> list[Words]:
    """List the combinations of values."""
    return [dict(zip(fields, values, strict=True)) for values in product(*fields.values())]


def _columns(**fields) -> list[Words]:
    """List the combinations of values with two different columns."""
    pairs = [{"column": one, "other": two} for one, two in permutations(COLUMNS, 2)]
    return [pair | words for pair, words in product(pairs, _each(**fields))]


def _things(number: int, **fields) -> list[Words]:
    """List the combinations of values with this many different goods of the department."""
    chosen = [
        {"department": department, **dict(zip(("thing", "second"), things, strict=False))}
        for department, goods in GOODS.items()
        for things in combinations(goods, number)
    ]
    return [things | words for things, words in product(chosen, _each(**fields))]


FORMS: dict[int, dict[str, tuple[str, str, list[Words]]]] = {
    2: {
        "above": (
            "How many goods in the {department} department have a {column} above {bound}?",
            "SELECT COUNT(*) FROM goods WHERE [{column} > {bound}]",
            _each(department=GOODS, column=COLUMNS, bound=BOUNDS),
        ),
        "below": (
            "How many goods in the {department} department have a {column} below {bound}?",
            "SELECT COUNT(*) FROM goods WHERE [{column} < {bound}]",
            _each(department=GOODS, column=COLUMNS, bound=BOUNDS),
        ),
        "both": (
            "How many goods in the {department} department have a {column} above {low} "
            "and a {other} below {high}?",
            "SELECT COUNT(*) FROM goods WHERE [{column} > {low}] AND [{other} < {high}]",
            _columns(department=GOODS, low=range(11, 19), high=range(21, 29)),
        ),
        "sum": (
            "What is the total {column} of the goods in the {department} department "
            "with a {other} below {bound}?",
            "SELECT COALESCE(SUM({column}), 0) FROM goods WHERE [{other} < {bound}]",
            _columns(department=GOODS, bound=BOUNDS),
        ),
        "highest": (
            "Which item in the {department} department has the {most} {column}, not counting the {thing}?",
            "SELECT name FROM goods WHERE [name <> '{thing}'] ORDER BY [{column} DESC] LIMIT 1",
            _things(1, column=COLUMNS),
        ),
        "lowest": (
            "Which item in the {department} department has the {least} {column}, not counting the {thing}?",
            "SELECT name FROM goods WHERE [name <> '{thing}'] ORDER BY [{column}] LIMIT 1",
            _things(1, column=COLUMNS),
        ),
        "property": (
            "What is the {column} of the {extreme} item in the {department} department, "
            "not counting the {thing}?",
            "SELECT {column} FROM goods WHERE [name <> '{thing}'] ORDER BY [{order}] LIMIT 1",
            [
                words
                for words in _things(1, extreme=EXTREMES, column=COLUMNS)
                if not EXTREMES[str(words["extreme"])].startswith(str(words["column"]))
            ],
        ),
        "together": (
            "What is the total {column} of the {thing} and the {second} in the {department} department?",
            "SELECT SUM({column}) FROM goods WHERE [name IN ('{thing}', '{second}')]",
            _things(2, column=COLUMNS),
        ),
        "pieces": (
            "How many units of the {thing} and the {second} in the {department} "
            "department were ordered in total?",
            "SELECT COALESCE(SUM(amount), 0) FROM orders WHERE [thing IN ('{thing}', '{second}')]",
            _things(2),
        ),
    },
    3: {
        "spent": (
            "How much did {customer} spend in the {department} department on goods with "
            "a {column} above {bound}?",
            "SELECT COALESCE(SUM([price] * amount), 0) FROM orders JOIN goods ON name = thing "
            "WHERE [customer = '{customer}'] AND [{column} > {bound}]",
            _each(customer=CUSTOMERS, department=GOODS, column=COLUMNS, bound=BOUNDS),
        ),
        "ordered": (
            "How many units of goods with a {column} below {bound} did {customer} order in the {department} "
            "department?",
            "SELECT COALESCE(SUM(amount), 0) FROM orders JOIN goods ON name = thing "
            "WHERE [customer = '{customer}'] AND [{column} < {bound}]",
            _each(customer=CUSTOMERS, department=GOODS, column=COLUMNS, bound=BOUNDS),
        ),
        "others": (
            "How many units of the {extreme} item in the {department} department did customers other than "
            "{customer} order?",
            "SELECT COALESCE(SUM(amount), 0) FROM orders WHERE [customer <> '{customer}'] AND thing = "
            "(SELECT name FROM goods ORDER BY [{order}] LIMIT 1)",
            _each(extreme=EXTREMES, department=GOODS, customer=CUSTOMERS),
        ),
        "favourite": (
            "What is the {extreme} item in the {department} department that {customer} ordered?",
            "SELECT name FROM orders JOIN goods ON name = thing WHERE [customer = '{customer}'] "
            "ORDER BY [{order}] LIMIT 1",
            _each(extreme=EXTREMES, department=GOODS, customer=CUSTOMERS),
        ),
        "not_ordered": (
            "What is the total {column} of the goods in the {department} department "
            "that {customer} did not order?",
            "SELECT SUM({column}) FROM goods WHERE name NOT IN "
            "(SELECT thing FROM orders WHERE [customer = '{customer}'])",
            _each(column=COLUMNS, department=GOODS, customer=CUSTOMERS),
        ),
        "spent_most": (
            "Which customer other than {customer} spent the most in the {department} department on goods "
            "other than the {thing}? If several did, give the name that comes first in the alphabet.",
            "SELECT customer FROM orders JOIN goods ON name = thing "
            "WHERE [customer <> '{customer}'] AND [thing <> '{thing}'] GROUP BY customer "
            "ORDER BY [SUM(price * amount) DESC], customer LIMIT 1",
            _things(1, customer=CUSTOMERS),
        ),
        "turnover": (
            "How much did customers other than {customer} spend in the {department} department on the "
            "{thing} and the {second}?",
            "SELECT COALESCE(SUM([price] * amount), 0) FROM orders JOIN goods ON name = thing "
            "WHERE [customer <> '{customer}'] AND [thing IN ('{thing}', '{second}')]",
            _things(2, customer=CUSTOMERS),
        ),
    },
}
"""Level -> form -> the question, the query, and the words for both. Brackets mark the parts of a query that
must matter: without one of them, it returns something else."""
PART = re.compile(r"\[(.*?)\]")


def questions(level: int, split: str, number: int) -> list[Words]:
    """List the questions of a split, which alternates between the forms.

    When all questions of a form have been asked, they are asked again about the next store.
    """
    forms: list[list[Words]] = []
    for form, (_, _, fields) in FORMS[level].items():
        words = random.Random(f"forms of {level} {form}").sample(fields, len(fields))
        forms.append(
            [
                {"level": level, "ask": form, **blanks}
                for place, blanks in enumerate(words[:MOST])
                if (place % TEST_SHARE == 0) == (split == "test")
            ]
        )
    asked: list[Words] = []
    for i in range(number):
        turn, form = divmod(i, len(forms))
        store, place = divmod(turn, len(forms[form]))
        asked.append({**forms[form][place], "store": store + 1})
    return asked


def fill(data: Words) -> list[str]:
    """List a question of level 2 or 3, the query that answers it, and the query without each of its parts."""
    question, query, _ = FORMS[int(str(data["level"]))][str(data["ask"])]
    words = {**data, "order": EXTREMES.get(str(data.get("extreme")))}
    words["most"], words["least"] = MOST_AND_LEAST.get(str(data.get("column")), ("", ""))
    query = query.format(**words)
    lacking = [query[: part.start()] + "(1 = 1)" + query[part.end() :] for part in PART.finditer(query)]
    return [question.format(**words), *(PART.sub(r"\1", text) for text in (query, *lacking))]
