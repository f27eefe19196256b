"""Variables of the tools as SPARQL, and the two stores that answer it: an embedded one and an endpoint.

A variable is a nested tuple: ``("entity", id)``, ``("neighbors", base, relation)``,
``("intersection", one, other)``, ``("argmax" or "argmin", base, attribute)`` or ``("count", base)``.
It is compiled as a whole, so that a store with a good optimizer never materializes intermediate sets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import islice

import httpx

from agentrl_env.client.credentials import public_url

try:
    import pyoxigraph
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "knowledgegraph needs pyoxigraph: pip install 'agentrl-kit[knowledgegraph]'"
    ) from error

NS = "http://rdf.freebase.com/ns/"
IDENTIFIER = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)+")
"""An entity, relation, attribute or type. No other text of a model or a file enters a query."""
HIDDEN = ("type.", "common.", "freebase.", "kg.", "user.", "dataworld.")
"""Namespaces of bookkeeping, which are hidden from the tools."""
MAX_PARTS = 24
"""Maximum parts of a variable's query. Each part is one join of at most the whole graph, which bounds the
time."""
MAX_ROWS = 100_000
MAX_BYTES = 64 * 2**20
XSD = "http://www.w3.org/2001/XMLSchema#"
ORDERED = ("integer", "int", "long", "decimal", "float", "double", "date", "dateTime", "gYear", "gYearMonth")
"""Data types of the values that argmax and argmin compare."""


class StoreUnavailable(RuntimeError):
    """The SPARQL endpoint does not answer, or its answer is not SPARQL results."""


class QueryTooSlow(Exception):
    """The endpoint gave up on a query, or its answer is too large."""


def iri(name: str) -> str:
    """Return an identifier as an IRI of a query. Raises ValueError for other text."""
    if not IDENTIFIER.fullmatch(name):
        raise ValueError(f"{name!r:.80} is no identifier")
    return f"<{NS}{name}>"


def parts(variable) -> int:
    """Return the number of parts of a variable's query. The base of argmax and argmin counts twice."""
    inner = sum(parts(part) for part in variable[1:] if isinstance(part, tuple))
    return 1 + inner * (2 if variable[0] in ("argmax", "argmin") else 1)


def members(variable) -> str:
    """Return the query for a variable's members, or for its number if it is a count.

    As in AgentBench, an answer does not contain the entities that its variable starts from.
    """
    if variable[0] == "count":
        return f"SELECT (COUNT(DISTINCT ?x) AS ?n) WHERE {{ {_answers(variable[1])} }}"
    return f"SELECT DISTINCT ?x WHERE {{ {_answers(variable)} }} LIMIT {MAX_ROWS + 1}"


def _answers(variable) -> str:
    """Return the pattern of a variable's members without the Freebase entities that it starts from."""
    starts = sorted(name for name in _entities(variable) if name.startswith(("m.", "g.")))
    return _pattern(variable, "?x") + "".join(f" FILTER(?x != {iri(name)})" for name in starts)


def _entities(variable) -> set[str]:
    if variable[0] == "entity":
        return {variable[1]}
    return {name for part in variable[1:] if isinstance(part, tuple) for name in _entities(part)}


def relations(variable) -> str:
    """Return the query for the relations that lead from a variable's members to other entities."""
    return _predicates(variable, "isIRI(?o)")


def attributes(variable) -> str:
    """Return the query for the comparable attributes of a variable's members."""
    return _predicates(variable, _ordered("?o"))


def has(variable, predicate: str, kind: str) -> str:
    """Return the query that checks if a variable's members have a relation or an attribute."""
    condition = "isIRI(?o)" if kind == "relation" else _ordered("?o")
    return f"ASK {{ {_subselect(variable, '?x')} ?x {iri(predicate)} ?o . FILTER({condition}) }}"


def expected_type(relation: str) -> str:
    """Return the query for the type of the entities that a relation leads to."""
    return f"SELECT ?t WHERE {{ {iri(relation)} {iri('type.property.expected_type')} ?t }} LIMIT 1"


def _predicates(variable, condition: str) -> str:
    pattern = _subselect(variable, "?x")
    return f"SELECT DISTINCT ?r WHERE {{ {pattern} ?x ?r ?o . FILTER({condition}) }} LIMIT {MAX_ROWS + 1}"


def _ordered(term: str) -> str:
    return f"DATATYPE({term}) IN ({', '.join(f'<{XSD}{name}>' for name in ORDERED)})"


def _subselect(variable, x: str) -> str:
    if variable[0] == "entity":
        return _pattern(variable, x)
    return f"{{ SELECT DISTINCT {x} WHERE {{ {_pattern(variable, x)} }} }}"


def _pattern(variable, x: str) -> str:
    """Return the group pattern that binds ``x`` to the members. Inner names extend the outer name."""
    kind, base = variable[0], variable[1]
    if kind == "entity":
        return f"VALUES {x} {{ {iri(base)} }}"
    if kind == "neighbors":
        return f"{_subselect(base, x + 'a')} {x}a {iri(variable[2])} {x} . FILTER(isIRI({x}))"
    if kind == "intersection":
        return f"{_subselect(base, x)} {_subselect(variable[2], x)}"
    best = f"{x}m"
    value = f"{x} {iri(variable[2])} {x}v . FILTER({_ordered(x + 'v')})"
    other = value.replace(x, f"{x}b")
    aggregate = "MAX" if kind == "argmax" else "MIN"
    return (
        f"{{ SELECT ({aggregate}({x}bv) AS {best}) WHERE {{ {_subselect(base, x + 'b')} {other} }} }} "
        f"{_subselect(base, x)} {value} FILTER({x}v = {best})"
    )


class EmbeddedStore:
    """A read-only RDF store in this process's memory. Its queries run without Python's lock."""

    def __init__(self, triples: Iterable[bytes]) -> None:
        self.store = pyoxigraph.Store()
        for chunk in triples:
            self.store.load(chunk, format=pyoxigraph.RdfFormat.N_TRIPLES)

    def __call__(self, query: str) -> list[str] | bool:
        """Return the first column of a SELECT, shortened, or the answer of an ASK."""
        return _plain(self.store.query(query))


class Endpoint:
    """A SPARQL 1.1 endpoint, such as Virtuoso with Freebase.

    Args:
        url: Address of the endpoint.
        timeout: Time limit of a query in seconds.
        client: HTTP client to use, instead of a new one.
    """

    def __init__(self, url: str, *, timeout: float = 20.0, client: httpx.Client | None = None) -> None:
        self.url, self.timeout = url, timeout
        self.client = client or httpx.Client(limits=httpx.Limits(max_connections=64))

    def __call__(self, query: str) -> list[str] | bool:
        """Return the first column of a SELECT, shortened, or the answer of an ASK.

        Raises QueryTooSlow if a smaller query might succeed, and StoreUnavailable.
        """
        accept = {"Accept": "application/sparql-results+json"}
        body, shown = bytearray(), public_url(self.url)
        try:
            with self.client.stream(
                "POST", self.url, data={"query": query}, headers=accept, timeout=self.timeout
            ) as response:
                for chunk in response.iter_bytes():
                    body += chunk
                    if len(body) > MAX_BYTES:
                        raise QueryTooSlow("the answer is too large")
        except httpx.ReadTimeout as error:
            raise QueryTooSlow(f"no answer within {self.timeout:g} seconds") from error
        except httpx.HTTPError as error:
            raise StoreUnavailable(f"the SPARQL endpoint {shown} does not answer: {error}") from error
        if response.status_code != 200:
            text = body[:300].decode("utf-8", "replace")
            # Virtuoso answers its own time limits with an S1T00 or 42000 error of "estimated execution time".
            if "S1T00" in text or "execution time" in text:
                raise QueryTooSlow("the endpoint's time limit")
            raise StoreUnavailable(f"the SPARQL endpoint {shown} answers {response.status_code}: {text}")
        try:
            results = pyoxigraph.parse_query_results(bytes(body), format=pyoxigraph.QueryResultsFormat.JSON)
            return _plain(results)
        except (SyntaxError, ValueError) as error:
            raise StoreUnavailable(f"{shown} does not answer with SPARQL results: {error}") from error


def _plain(results) -> list[str] | bool:
    if isinstance(results, pyoxigraph.QueryBoolean):
        return bool(results)
    terms = (solution[0] for solution in islice(results, MAX_ROWS + 1))
    return [term.value.removeprefix(NS) for term in terms if term is not None]
