"""The rules of acceptance on their own: whatever is drafted, what comes out follows the verifier's laws."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
from enumeration import ScriptedDraws, outcome_law
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from offload_rt.sampling import Draws, accepted_before, pick
from offload_rt.verification import (
    ROOT,
    Draft,
    Verdict,
    residual,
    verify,
    verify_chain,
    verify_matching,
    verify_sampled,
)

VOCABULARY = 4


def as_law(weights: Sequence[float]) -> Tensor:
    law = torch.tensor(weights, dtype=torch.float64)
    return law / law.sum()


def random_law(source: random.Random) -> Tensor:
    """With zeros in it, mostly."""
    possible = source.sample(range(VOCABULARY), source.randint(1, VOCABULARY))
    return as_law([source.random() if token in possible else 0.0 for token in range(VOCABULARY)])


class Laws:
    """A random law after every text, for a verifier and for a drafter."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def __call__(self, who: str, text: tuple[int, ...]) -> Tensor:
        return random_law(random.Random(f"{self._seed} {who} {text}"))


def drafted(
    laws: Laws, draws: Draws, parents: Sequence[int], *, replacement: bool
) -> tuple[Draft, list[tuple[int, ...]]]:
    """A tree of this shape, sampled; and the text at each node. Nodes without a law left are dropped."""
    tokens: list[int] = []
    kept: list[int] = []
    rows: list[Tensor] = []
    texts: list[tuple[int, ...]] = []
    number: dict[int, int] = {ROOT: ROOT}
    for node, parent in enumerate(parents):
        if parent not in number:
            continue
        above = texts[number[parent]] if parent != ROOT else ()
        law = laws("draft", above)
        if not replacement:
            for elder, its_parent in enumerate(kept):
                if its_parent == number[parent]:
                    law = law.clone()
                    law[tokens[elder]] = 0
            if law.sum() == 0:
                continue
            law = law / law.sum()
        number[node] = len(tokens)
        rows.append(law)
        tokens.append(int(draws.categorical(law)))
        kept.append(number[parent])
        texts.append((*above, tokens[-1]))
    return Draft(tokens, kept, torch.stack(rows)), texts


SHAPES = st.lists(st.integers(0, 4), min_size=1, max_size=4).map(
    lambda numbers: [min(number, node) - 1 for node, number in enumerate(numbers)]
)


@given(seed=st.integers(0, 10**6), parents=SHAPES, replacement=st.booleans())
@settings(derandomize=True, deadline=None, max_examples=40)
def test_sampled_trees_of_any_shape(seed: int, parents: list[int], replacement: bool) -> None:
    """Each token that is put out follows the verifier's law, given those before it and that it is put out."""
    laws = Laws(seed)

    def run(draws: Draws) -> tuple[int, ...]:
        draft, texts = drafted(laws, draws, parents, replacement=replacement)
        rows = torch.stack([laws("verifier", text) for text in [(), *texts]])
        verdict = verify(draft, rows, draws)
        return (*(draft.tokens[node] for node in verdict.path), verdict.token)

    assert_follows(laws, outcome_law(run))


@given(seed=st.integers(0, 10**6), parents=SHAPES)
@settings(derandomize=True, deadline=None, max_examples=40)
def test_deterministic_trees_of_any_shape(seed: int, parents: list[int]) -> None:
    """Even with siblings that bear the same token."""
    laws, source = Laws(seed), random.Random(seed)
    draft = Draft([source.randrange(VOCABULARY) for _ in parents], parents)
    texts: list[tuple[int, ...]] = []
    for token, parent in zip(draft.tokens, parents, strict=True):
        texts.append((*(texts[parent] if parent != ROOT else ()), token))
    rows = torch.stack([laws("verifier", text) for text in [(), *texts]])

    def run(draws: Draws) -> tuple[int, ...]:
        verdict = verify(draft, rows, draws)
        return (*(draft.tokens[node] for node in verdict.path), verdict.token)

    assert_follows(laws, outcome_law(run))


def assert_follows(laws: Laws, found: dict[tuple[int, ...], float]) -> None:
    stands: dict[tuple[int, ...], float] = defaultdict(float)
    for output, weight in found.items():
        for end in range(len(output) + 1):
            stands[output[:end]] += weight
    assert stands[()] == pytest.approx(1.0)
    for before in {output[:-1] for output in stands if output}:
        followed = [stands.get((*before, token), 0.0) for token in range(VOCABULARY)]
        law = [weight / sum(followed) for weight in followed]
        assert law == pytest.approx(laws("verifier", before).tolist(), abs=1e-9)


def decided(draft: Draft, rows: Tensor, draws: Draws) -> tuple[int, ...]:
    """What `verify_chain` puts out."""
    accepted, token = verify_chain(torch.tensor(draft.tokens, dtype=torch.long), draft.laws, rows, draws)
    return (*draft.tokens[: int(accepted)], int(token))


@given(seed=st.integers(0, 10**6), nodes=st.integers(0, 4))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_sampled_chains_on_the_device(seed: int, nodes: int) -> None:
    """The same law as by the walk, however long the chain; and that is the verifier's."""
    laws = Laws(seed)

    def run(by_walk: bool, draws: Draws) -> tuple[int, ...]:
        if nodes:
            draft, texts = drafted(laws, draws, range(ROOT, nodes - 1), replacement=True)
        else:
            draft, texts = Draft((), (), torch.zeros(0, VOCABULARY, dtype=torch.float64)), []
        rows = torch.stack([laws("verifier", text) for text in [(), *texts]])
        if by_walk:
            verdict = verify(draft, rows, draws)
            return (*(draft.tokens[node] for node in verdict.path), verdict.token)
        return decided(draft, rows, draws)

    found, walked = (outcome_law(partial(run, by_walk)) for by_walk in (False, True))
    assert_follows(laws, found)
    assert found == pytest.approx(walked, abs=1e-12)


@given(seed=st.integers(0, 10**6), nodes=st.integers(0, 4))
@settings(derandomize=True, deadline=None, max_examples=40)
def test_deterministic_chains_on_the_device(seed: int, nodes: int) -> None:
    laws, source = Laws(seed), random.Random(seed)
    draft = Draft.chain([source.randrange(VOCABULARY) for _ in range(nodes)])
    rows = torch.stack([laws("verifier", tuple(draft.tokens[:end])) for end in range(nodes + 1)])
    assert_follows(laws, outcome_law(partial(decided, draft, rows)))


class GivenUniforms:
    """The program's own draws, of given uniform numbers: one for each node, one for the last token."""

    def __init__(self, nodes: Sequence[float], last: float) -> None:
        self._nodes = list(nodes)
        self._last = torch.tensor(last, dtype=torch.float64)

    def categorical(self, law: Tensor) -> Tensor:
        return pick(law, self._last)

    def accept(self, probability: float) -> bool:
        return self._nodes.pop(0) < probability

    def accepted(self, probabilities: Tensor) -> Tensor:
        return accepted_before(torch.tensor(self._nodes, dtype=torch.float64), probabilities)


UNIFORM = st.floats(0, 1, exclude_max=True)


@given(seed=st.integers(0, 10**6), uniforms=st.lists(UNIFORM, max_size=6), last=UNIFORM)
@settings(derandomize=True, deadline=None, max_examples=150)
def test_the_rule_on_the_device_is_the_walk(seed: int, uniforms: list[float], last: float) -> None:
    """Token for token, of the same uniform numbers."""
    source = random.Random(seed)
    proposals = torch.stack([random_law(source) for _ in range(len(uniforms) + 1)])[1:]
    tokens = [source.choices(range(VOCABULARY), law.tolist())[0] for law in proposals]
    draft = Draft.chain(tokens, proposals)
    # Near the proposals, so that long runs are accepted.
    rows = torch.stack([random_law(source) for _ in range(len(uniforms) + 1)])
    rows[:-1] = 0.7 * proposals + 0.3 * rows[:-1]
    verdict = verify(draft, rows, GivenUniforms(uniforms, last))
    walked = (*(draft.tokens[node] for node in verdict.path), verdict.token)
    assert decided(draft, rows, GivenUniforms(uniforms, last)) == walked


def test_the_rule_on_the_device_by_integration() -> None:
    """Over a grid of its uniform numbers, one draft after the other: what comes out follows the law."""
    proposal, law = as_law([1, 2, 3, 4]), as_law([4, 1, 0, 5])
    steps = 40
    grid = [(step + 0.5) / steps for step in range(steps)]
    found = [0.0] * VOCABULARY
    for token, weight in enumerate(proposal.tolist()):
        draft = Draft.chain([token], proposal[None])
        for uniform, last in product(grid, grid):
            first = decided(draft, law.expand(2, -1), GivenUniforms([uniform], last))[0]
            found[first] += weight / steps**2
    assert found == pytest.approx(law.tolist(), abs=1 / steps)
    assert found[2] == 0


def test_the_residual_is_sampled_after_a_rejection() -> None:
    """Sampling the whole law there, as one published program does, would give (.44, .56)."""
    proposal, law = as_law([0.2, 0.8]), as_law([0.6, 0.4])

    def run(draws: Draws) -> int:
        token = int(draws.categorical(proposal))
        draft = Draft.chain([token], proposal[None])
        verdict = verify(draft, torch.stack([law, as_law([1, 1])]), draws)
        return draft.tokens[0] if verdict.path else verdict.token

    found = outcome_law(run)
    assert [found[0], found[1]] == pytest.approx([0.6, 0.4])


def test_acceptance_is_as_likely_as_the_laws_overlap() -> None:
    """Lossless is not enough: one minus the total variation is accepted, no less."""
    proposal, law = as_law([1, 2, 3, 4]), as_law([4, 1, 0, 5])

    def run(draws: Draws) -> bool:
        draft = Draft.chain([int(draws.categorical(proposal))], proposal[None])
        return bool(verify(draft, law.expand(2, -1), draws).path)

    def run_on_the_device(draws: Draws) -> bool:
        draft = Draft.chain([int(draws.categorical(proposal))], proposal[None])
        return len(decided(draft, law.expand(2, -1), draws)) == 2

    for rule in (run, run_on_the_device):
        assert outcome_law(rule)[True] == pytest.approx(float(torch.minimum(proposal, law).sum()))


def test_an_equal_law_accepts_every_draft() -> None:
    law = as_law([1, 2, 3, 4])
    draft = Draft.chain([3, 0, 2], law.expand(3, -1))
    draws = ScriptedDraws()
    assert verify(draft, law.expand(4, -1), draws).path == [0, 1, 2]
    assert draws.probability == pytest.approx(0.1)  # of the last token alone


def test_without_a_draft_the_token_is_drawn_from_the_law() -> None:
    law = as_law([1, 2, 3, 4])
    for draft in (Draft(), Draft((), (), law.new_zeros(0, 4))):
        found = outcome_law(lambda draws, draft=draft: verify(draft, law[None], draws).token)  # type: ignore[misc]
        assert [found[token] for token in range(4)] == pytest.approx(law.tolist())


def test_matching_walks_to_the_child_that_bears_the_token() -> None:
    #        0:a ── 2:c
    # root <     └─ 3:d ── 5:a
    #        1:b ── 4:c
    draft = Draft([10, 11, 12, 13, 12, 10], [ROOT, ROOT, 0, 0, 1, 3])
    asked: list[int] = []

    def choose(tokens: dict[int, int]):  # type: ignore[no-untyped-def]
        def token_of(row: int) -> int:
            asked.append(row)
            return tokens[row]

        return token_of

    assert verify_matching(draft, choose({0: 10, 1: 13, 4: 10, 6: 7})) == Verdict([0, 3, 5], 7)
    assert asked == [0, 1, 4, 6]  # once for each row that the walk reaches, and for no other
    assert verify_matching(draft, choose({0: 11, 2: 13})) == Verdict([1], 13)
    assert verify_matching(draft, choose({0: 12})) == Verdict([], 12)


def test_siblings_are_tried_in_order_and_their_subtrees_skipped() -> None:
    draft_laws = torch.eye(3, dtype=torch.float64)[[0, 2, 1]]
    draft = Draft([0, 2, 1], [ROOT, 0, ROOT], draft_laws)
    laws = torch.eye(3, dtype=torch.float64)[[1, 0, 0, 2]]  # wants 1, and after that 2
    assert verify_sampled(draft, laws, ScriptedDraws()) == Verdict([2], 2)


def test_residual() -> None:
    assert residual(as_law([6, 4]), as_law([2, 8])).tolist() == [1.0, 0.0]
    assert residual(as_law([5, 3, 2]), as_law([1, 1, 8])).tolist() == pytest.approx(
        [2 / 3, 1 / 3, 0], abs=0.1
    )
    law = as_law([1, 2, 3])
    assert torch.equal(residual(law, law), law)  # nothing is left: only rounding leads here


def test_a_sampled_draft_must_report_laws() -> None:
    with pytest.raises(ValueError, match="laws"):
        verify_sampled(Draft.chain([1]), torch.ones(2, 4), ScriptedDraws())


def test_chain_and_children() -> None:
    chain = Draft.chain([7, 8, 9])
    assert list(chain.parents) == [ROOT, 0, 1]
    assert chain.is_chain and Draft().is_chain
    assert not Draft([1, 2], [ROOT, ROOT]).is_chain
    draft = Draft([1, 2, 3, 4], [ROOT, 0, ROOT, 0])
    assert draft.children(ROOT) == [0, 2]
    assert draft.children(0) == [1, 3]
    assert draft.children(3) == []


@pytest.mark.parametrize(
    ("tokens", "parents", "laws"),
    [([1, 2], [ROOT], None), ([1], [0], None), ([1], [-2], None), ([1], [ROOT], torch.ones(2, 4))],
)
def test_a_malformed_draft_is_refused(tokens: list[int], parents: list[int], laws: Tensor | None) -> None:
    with pytest.raises(ValueError):
        Draft(tokens, parents, laws)
