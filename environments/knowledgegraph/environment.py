"""Knowledge graph: answer a question by following relations in a graph, with AgentBench's seven tools.

The tools do not return entities. They create variables, which are sets of entities that the store computes.
The default store is a generated world in this process. ``KNOWLEDGEGRAPH_DATA`` adds the questions of an
AgentBench file as the split ``official``. ``KNOWLEDGEGRAPH_SPARQL`` is the address of the SPARQL endpoint for
them.
"""

from __future__ import annotations

import os
import re
from threading import Lock

from agentrl_env import Done, Environment, Message, Reply, ToolCall, ToolError, Wording, tool

from . import sparql
from .official import grade, read_questions
from .sparql import EmbeddedStore, Endpoint, QueryTooSlow
from .world import NUM_QUESTIONS, SHAPES, Questions, world

FINAL = re.compile(r"final answer:\s*(?:#\s*)?(\d+)", re.IGNORECASE)
MAX_VARIABLES = 64
INSTRUCTIONS = (
    "Answer the question with the tools, which query a knowledge base. The results of get_neighbors, "
    "intersection, argmax, argmin and count are variables: #0 is the first, #1 the second, and so on. Call "
    "get_relations before get_neighbors, and get_attributes before argmax and argmin, to see the names that "
    "can be used. When a variable is the answer, write 'Final Answer: #id' with its number, as text, without "
    "a tool call."
)


def _splits() -> tuple[str, ...]:
    levels = [f"-{level}" if level > 1 else "" for level in SHAPES]
    official = ("official",) if os.environ.get("KNOWLEDGEGRAPH_DATA") else ()
    return (*(name + level for level in levels for name in NUM_QUESTIONS), *official)


class Knowledgegraph(Environment):
    """Answer a question by finding the set of entities in a knowledge base that it asks for."""

    splits = _splits()
    max_turns = 15
    wording = Wording(
        os.environ.get("KNOWLEDGEGRAPH_WORDING"),
        opening=f"{INSTRUCTIONS}\n\nQuestion: {{question}}\nEntities: [{{entities}}]",
        names="[{names}]",
        variable="Variable #{number}, which are instances of {type}.",
        count="Variable #{number}, which is a number.",
        no_tool_call="Call a tool, or write 'Final Answer: #id' if a variable is the answer.",
    )
    reset_timeout = 300.0
    expert_noise = 0.0
    """Probability that the expert follows another relation and takes its variable for the answer."""
    lock = Lock()
    stores: dict = {}  # noqa: RUF012

    @classmethod
    def samples(cls, split):
        """Return the questions of "train" (level 1), "validation-3", "official" and so on."""
        if split == "official":
            return read_questions(os.environ["KNOWLEDGEGRAPH_DATA"])
        name, _, level = split.partition("-")
        return Questions(name, int(level or 1))

    @classmethod
    def startup(cls):
        cls.store("")

    @classmethod
    def store(cls, url):
        """Return the store of an endpoint, or of the generated world for "". Sessions share it."""
        with cls.lock:
            if url not in cls.stores:
                cls.stores[url] = Endpoint(url) if url else EmbeddedStore(world().triples(sparql.NS))
            return cls.stores[url]

    def reset(self, sample, rng):
        data = sample.data
        self.url = ""
        if data.get("needs"):
            self.url = os.environ.get("KNOWLEDGEGRAPH_SPARQL", "")
            if not self.url:
                raise RuntimeError(
                    "the question of an AgentBench file needs a SPARQL endpoint with its facts (Freebase): "
                    "set KNOWLEDGEGRAPH_SPARQL to its address"
                )
            if len(data["needs"]) > 1:
                raise ValueError(f"question {data.get('qid')!r} needs {', '.join(data['needs'][1:])}")
        self.gold = [_parse(action) for action in data.get("actions", ())]
        self.answer = data["answer"]
        self.names = dict(data["entities"])
        self.variables: list = []
        """Each variable, and the type of its members."""
        self.progress, self.mapping, self.f1 = 0, {}, 0.0
        known = set(self.names.values())
        # Some records start from an identifier that is missing from their list of entities.
        for _, arguments in self.gold:
            known |= {part for part in arguments[:1] if sparql.IDENTIFIER.fullmatch(part)}
        self.known = sorted(known)
        return self.wording.opening(question=data["question"], entities=", ".join(self.names))

    @tool
    def get_relations(self, variable: str):
        """List the relations that lead from an entity, or from the members of a variable, to other entities.

        Args:
            variable: An entity of the question, or a variable such as #0.
        """
        found = self._ask(sparql.relations(self._set(variable)))
        self._done("get_relations", variable)
        return self._list(found)

    @tool
    def get_neighbors(self, variable: str, relation: str):
        """Make a variable of all entities that a relation leads to; see get_relations() for the relations.

        Args:
            variable: An entity of the question, or a variable such as #0.
            relation: A relation of it.
        """
        base = self._set(variable)
        self._require(base, variable, relation, "relation")
        kind = self._ask(sparql.expected_type(relation)) or ["common.topic"]
        return self._make(("neighbors", base, relation), kind[0], "get_neighbors", variable, relation)

    @tool
    def intersection(self, variable1: str, variable2: str):
        """Make a variable of the entities that are in both of two variables of the same type.

        Args:
            variable1: A variable such as #0.
            variable2: Another variable.
        """
        (one, kind), (other, second) = self._variable(variable1), self._variable(variable2)
        if kind != second:
            raise ToolError(
                f"{variable1} holds instances of {kind}, and {variable2} of {second}: no intersection."
            )
        return self._make(("intersection", one, other), kind, "intersection", variable1, variable2)

    @tool
    def get_attributes(self, variable: str):
        """List the numerical attributes of a variable's members, for argmax() and argmin().

        Args:
            variable: A variable such as #0.
        """
        found = self._ask(sparql.attributes(self._variable(variable)[0]))
        self._done("get_attributes", variable)
        return self._list(found)

    @tool
    def argmax(self, variable: str, attribute: str):
        """Make a variable of the members with the highest value of an attribute; see get_attributes().

        Args:
            variable: A variable such as #0.
            attribute: An attribute of it.
        """
        return self._extreme("argmax", variable, attribute)

    @tool
    def argmin(self, variable: str, attribute: str):
        """Make a variable of the members with the lowest value of an attribute; see get_attributes().

        Args:
            variable: A variable such as #0.
            attribute: An attribute of it.
        """
        return self._extreme("argmin", variable, attribute)

    @tool
    def count(self, variable: str):
        """Make a variable of the number of a variable's members.

        Args:
            variable: A variable such as #0.
        """
        return self._make(("count", self._variable(variable)[0]), "type.int", "count", variable)

    def respond(self, text):
        final = FINAL.search(text)
        if final is None:
            return Reply(self.wording.text("no_tool_call"), metrics={"invalid_calls": 1.0})
        number = int(final[1][:9])
        if number >= len(self.variables):
            return Reply(f"There is no variable #{number}.", metrics={"invalid_calls": 1.0})
        found = self._ask(sparql.members(self.variables[number][0]))
        right, self.f1 = grade(found, self.answer)
        return Done("Correct." if right else "That is not the answer.", reward=float(right))

    def score(self):
        return {"f1": self.f1}

    def snapshot(self):
        return vars(self)

    def restore(self, state):
        vars(self).update(state)

    def expert(self, rng):
        """Repeat the gold calls of the question, with the variable numbers of this episode."""
        if not self.gold:
            raise ToolError("This question has no gold calls.")
        if self.expert_noise > 0 and len(self.variables) > len(self.mapping):
            return Message.assistant(f"Final Answer: #{len(self.variables) - 1}")
        if self.progress == len(self.gold):
            return Message.assistant(f"Final Answer: {self.mapping[len(self.mapping) - 1]}")
        name, arguments = self.gold[self.progress]
        if len(arguments) != len(PARAMETERS.get(name, ())):
            raise ToolError(f"The gold call {name!r:.80} of this question is no call of a tool.")
        shown = {entity: name for name, entity in self.names.items()}
        values = [self._here(shown.get(part, part)) for part in arguments]
        if name == "get_neighbors" and rng.random() < self.expert_noise:
            listed = _visible(self._ask(sparql.relations(self._set(values[0]))))
            others = [relation for relation in listed if relation != values[1]]
            values[1] = str(rng.choice(others)) if others else values[1]
        return Message.assistant(None, ToolCall.of(name, **dict(zip(PARAMETERS[name], values, strict=True))))

    def _here(self, argument):
        """Translate a variable of the gold calls to its number in this episode."""
        if re.fullmatch(r"#\d+", argument):
            return self.mapping.get(int(argument[1:]), argument)
        return argument

    def _done(self, name, *arguments, made=None):
        """Record that a call succeeded. The expert continues after its last successful call."""
        if self.progress == len(self.gold):
            return
        wanted, parts = self.gold[self.progress]
        given = [self.names.get(part.strip(), part.strip()) for part in arguments]
        if name == wanted and given == [self._here(part) for part in parts]:
            self.progress += 1
            if made is not None:
                self.mapping[len(self.mapping)] = made

    def _set(self, text):
        """Return an entity of the question, or a variable that is a set. Raises ToolError."""
        text = text.strip()
        if text.startswith("#"):
            return self._variable(text)[0]
        entity = self.names.get(text, text)
        if entity not in self.known:
            raise ToolError(
                f"{text!r:.80} is neither an entity of the question nor a variable such as #0. "
                f"Entities: [{', '.join(self.names)}]"
            )
        return ("entity", entity)

    def _variable(self, text):
        """Return a variable that is a set, and its type. Raises ToolError."""
        text = text.strip()
        number = int(text[1:]) if re.fullmatch(r"#[0-9]{1,9}", text) else MAX_VARIABLES
        if number >= len(self.variables):
            known = f"there are #0 to #{len(self.variables) - 1}" if self.variables else "there is none yet"
            raise ToolError(f"{text!r:.80} is not a variable; {known}.")
        variable, kind = self.variables[number]
        if variable[0] == "count":
            raise ToolError(f"{text} is a number, not a set of entities.")
        return variable, kind

    def _require(self, base, variable, predicate, kind):
        known = sparql.IDENTIFIER.fullmatch(predicate) and not predicate.startswith(sparql.HIDDEN)
        if not known or not self._ask(sparql.has(base, predicate, kind)):
            raise ToolError(f"{variable} has no {kind} {predicate!r:.80}; get_{kind}s() lists those it has.")

    def _extreme(self, operation, variable, attribute):
        base, kind = self._variable(variable)
        self._require(base, variable, attribute, "attribute")
        return self._make((operation, base, attribute), kind, operation, variable, attribute)

    def _make(self, variable, kind, name, *arguments):
        if sparql.parts(variable) > sparql.MAX_PARTS or len(self.variables) >= MAX_VARIABLES:
            raise ToolError("This variable would be too complex. Find a shorter way to the answer.")
        self.variables.append((variable, kind))
        self._done(name, *arguments, made=f"#{len(self.variables) - 1}")
        number = len(self.variables) - 1
        if name == "count":
            return self.wording.text("count", number=number)
        return self.wording.text("variable", number=number, type=kind)

    def _list(self, found):
        return self.wording.text("names", names=", ".join(_visible(found)))

    def _ask(self, query):
        try:
            return self.store(self.url)(query)
        except QueryTooSlow as error:
            raise ToolError(f"The query was given up: {error}. Ask for less.") from error


PARAMETERS = {
    spec.function.name: list(spec.function.parameters["properties"]) for spec in Knowledgegraph.tool_specs()
}


def _visible(found):
    """Return the relations or attributes that the tools list, in order."""
    return sorted(name for name in found if not name.startswith(sparql.HIDDEN))


def _parse(action):
    """Return the name and the arguments of a gold call such as ``get_neighbors(#0,film.film.genre)``."""
    name, _, rest = action.partition("(")
    return name.strip(), [part.strip() for part in rest.rstrip().removesuffix(")").split(",")]
