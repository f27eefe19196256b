"""Trees of sequences with common prefixes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl_train.batch import MOST_COPIES, families
from agentrl_train.batch import SHORTEST_BEGINNING as SHORTEST
from agentrl_train.learner.logprobs import prefix_tree

HEAD = st.integers(0, 3 * SHORTEST)


@st.composite
def conversations(draw):
    """Generate sequences that start with part of an earlier sequence or with their own tokens."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    found = []
    for _ in range(draw(st.integers(1, 6))):
        head = (
            found[draw(st.integers(0, len(found) - 1))][: draw(HEAD)] if found and draw(st.booleans()) else []
        )
        tail = rng.integers(0, 5, draw(st.integers(0 if len(head) else 1, 40)))
        found.append(np.concatenate([head, tail]).astype(np.int64))
    return found


def spelled(sequences, tree):
    """Return the tokens of a tree."""
    return np.concatenate(sequences)[tree.kept]


@given(conversations())
def test_every_token_is_in_the_tree_once_after_its_predecessors(sequences):
    tree = prefix_tree(sequences)
    tokens = spelled(sequences, tree)
    assert np.array_equal(tokens[tree.places], np.concatenate(sequences))
    ends = np.cumsum([len(one) for one in sequences])
    paths = [places.tolist() for places in np.split(tree.places, ends[:-1])]
    covered = [place for branch in tree.branches for place in range(branch.begin, branch.end)]
    assert covered == list(range(len(tokens)))
    for branch in tree.branches:
        before = [place for begin, end in branch.context for place in range(begin, end)]
        whole = [*before, *range(branch.begin, branch.end)]
        assert any(branch.begin in path and path.index(branch.begin) == len(before) for path in paths)
        assert any(path[: len(whole)] == whole for path in paths)


@given(conversations())
def test_tree_exceeds_its_longest_sequence_by_the_unshared_tokens(sequences):
    kept = len(prefix_tree(sequences).kept)
    assert max(map(len, sequences)) <= kept <= sum(map(len, sequences))
    assert len(prefix_tree([*sequences, *sequences]).kept) <= kept + sum(
        len(one) for one in sequences if len(one) < SHORTEST
    )


@given(conversations(), st.integers(1, 120))
def test_each_sequence_is_in_exactly_one_family_and_its_tree_fits(sequences, most):
    parts = families(sequences, most)
    assert sorted(i for part in parts for i in part) == list(range(len(sequences)))
    for part in parts:
        assert len(part) == 1 or len(prefix_tree([sequences[i] for i in part]).kept) <= most
        assert len(part) == 1 or sum(len(sequences[i]) for i in part) <= MOST_COPIES * most


def test_siblings_share_their_opening_and_the_turns_in_which_they_agree():
    opening, turn = np.arange(100), np.arange(200, 240)
    siblings = [np.concatenate([opening, turn, [n]]) for n in range(4)]
    others = [np.concatenate([opening, [300 + n]]) for n in range(4)]
    tree = prefix_tree([*siblings, *others])
    assert len(tree.kept) == 100 + 40 + 4 + 4
    assert len(families([*others, *siblings], 242)) == 1
    assert len(families([*others, *siblings], 148)) == 2


def test_short_prefixes_are_not_shared():
    a, b = np.arange(SHORTEST + 5), np.arange(SHORTEST + 5)
    b[SHORTEST - 1 :] += 100
    assert len(prefix_tree([a, b]).branches) == 2
    assert len(prefix_tree([a, b]).kept) == len(a) + len(b)
