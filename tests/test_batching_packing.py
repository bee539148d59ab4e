"""Packing: every bag once, within the limits, in few microbatches, the same every time."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.batching.bag_sizes import BagSize, Sizes
from xpmir_uform.batching.balance import balance
from xpmir_uform.batching.cost import CostModel
from xpmir_uform.batching.packer import BagPacker, pack
from xpmir_uform.batching.shape import BatchShape

MODEL = CostModel(tokens=100.0, squares=0.5, items=30.0, constant=1000.0)


def sized(bags):
    """Bags of (lengths, choices), whose items follow one another."""
    made, start = [], 0
    for lengths, choices in bags:
        made.append(BagSize(range(start, start + len(lengths)), tuple(lengths), key=1000 + start, choices=choices))
        start += len(lengths)
    return made


BAGS = st.lists(st.tuples(st.lists(st.integers(1, 40), min_size=1, max_size=4), st.integers(0, 5)), max_size=60)
LIMITS = st.fixed_dictionaries(
    {},
    optional={
        "tokens": st.integers(160, 400),
        "items": st.integers(4, 20),
        "bags": st.integers(1, 10),
        "choices": st.integers(5, 20),
        "longest": st.integers(40, 80),
    },
)
BUDGETS = st.one_of(st.just(float("inf")), st.floats(500.0, 40_000.0))
MODELS = st.sampled_from([MODEL, CostModel()])


def cost(model, bags, part):
    return model.predict([length for number in part for length in bags[number].lengths])


@settings(max_examples=200, deadline=None)
@given(BAGS, LIMITS, BUDGETS, MODELS)
def test_every_bag_once_and_every_limit_held(bags, limits, budget, model):
    bags = sized(bags)
    parts = pack(bags, limits, model, budget)
    assert sorted(number for part in parts for number in part) == list(range(len(bags)))
    assert all(part == sorted(part) and part for part in parts)
    for part in parts:
        sizes = Sizes.of([bags[number] for number in part])
        assert all(getattr(sizes, name).sum() <= limit for name, limit in limits.items() if name != "longest")
        assert len(part) == 1 or cost(model, bags, part) <= budget * (1 + 1e-12)


@settings(max_examples=100, deadline=None)
@given(BAGS, LIMITS, BUDGETS, MODELS, st.randoms(use_true_random=False))
def test_the_order_of_bags_changes_no_microbatch_but_its_numbers(bags, limits, budget, model, random):
    """What is compared is all that packing may look at: so of bags alike in it any may stand for another."""

    def contents(bags):
        sizes = Sizes.of(bags)
        seen = [model.of_bags(sizes), *(getattr(sizes, name) for name in limits if name != "longest")]
        alike = list(zip(*(column.tolist() for column in seen), strict=True))
        return [sorted(alike[number] for number in part) for part in pack(bags, limits, model, budget)]

    if bags:
        assert contents(sized(bags)) == contents(sized(random.sample(bags, len(bags))))


def test_equal_bags_are_taken_in_order():
    bags = sized([([5, 5], 0)] * 7)
    assert pack(bags, {"bags": 3}, MODEL) == [[0, 1, 2], [3, 4, 5], [6]]


def test_heavy_bags_come_first():
    bags = sized([([2], 0), ([30], 0), ([3], 0), ([31], 0), ([1], 0)])
    assert pack(bags, {}, CostModel(), budget=33) == [[0, 3], [1, 2], [4]]


def test_first_fit_decreasing_is_what_the_packer_makes():
    """Against the plain form: each bag, heaviest first, goes to the first microbatch that has room."""
    draw = generator(0, Purpose.ORDER)
    bags = sized([([int(n)], 0) for n in draw.integers(1, 60, 300)])
    budget, plain = 101, []
    for number in sorted(range(300), key=lambda n: (-bags[n].lengths[0], n)):
        size = bags[number].lengths[0]
        home = next((p for p in plain if sum(bags[n].lengths[0] for n in p) + size <= budget), None)
        if home is None:
            plain.append(home := [])
        home.append(number)
    assert pack(bags, {}, CostModel(), budget) == [sorted(part) for part in plain]


@pytest.mark.parametrize("limits", [{}, {"tokens": 6000}, {"items": 1000, "tokens": 9000}])
def test_at_least_85_percent_of_the_budget_is_used(limits):
    """But for the last microbatch, and unless a hard limit binds first."""
    draw = generator(1, Purpose.ORDER)
    lengths = draw.lognormal(3.2, 0.8, (3000, 2)).astype(int).clip(1, 300)
    bags = sized([(row.tolist(), 0) for row in lengths])
    budget = MODEL.predict([30] * 150)
    costs = [cost(MODEL, bags, part) for part in pack(bags, limits, MODEL, budget)]
    assert len(costs) > 20
    assert min(costs[:-1]) >= 0.85 * budget
    assert max(costs) <= budget


def test_half_as_heavy_bags_share_microbatches_with_light_ones():
    draw = generator(2, Purpose.ORDER)
    bags = sized([([int(n)], 0) for n in draw.integers(1, 1000, 400)])
    budget = 1000
    parts = pack(bags, {}, CostModel(), budget)
    assert sum(bag.lengths[0] for bag in bags) >= 0.95 * budget * (len(parts) - 1)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"rows": 2, "columns": 20}, r"0x.*3ea has 41 tokens and a microbatch holds at most 40"),
        ({"columns": 19}, r"0x.*3ea has 20 tokens in one item and a microbatch holds at most 19"),
        ({"segments": 2}, r"0x.*3ea has 3 items"),
        ({"choices": 6}, r"0x.*3ea has 7 choices"),
    ],
)
def test_a_bag_that_no_microbatch_can_hold_is_refused_by_key(shape, message):
    bags = sized([([1, 1], 0), ([20, 20, 1], 7), ([2], 1)])
    with pytest.raises(ValueError, match=message):
        BagPacker.C().instance().plan(bags, BatchShape.C(**shape).instance(), MODEL, 1e9)


def test_a_bag_above_the_budget_goes_alone():
    bags = sized([([3], 0), ([500], 0), ([4], 0)])
    assert pack(bags, {}, CostModel(), budget=10) == [[1], [0, 2]]


def test_a_budget_below_the_constant_leaves_every_bag_alone():
    assert pack(sized([([3], 0)] * 3), {}, MODEL, budget=10.0) == [[0], [1], [2]]


def test_no_bags_no_microbatches():
    assert pack([], {"bags": 1}, MODEL, 5.0) == []


def test_limits_that_are_zero_are_absent():
    assert BatchShape.C().instance().limits() == {}
    assert BatchShape.C(rows=3, columns=5).instance().limits() == {"longest": 5, "tokens": 15}


@pytest.mark.parametrize("shape", [{"rows": 4}, {"bags": -1}])
def test_shapes_that_make_no_sense_are_refused(shape):
    from xpmir_uform.base.configuration import validate

    with pytest.raises(ValueError, match="expected"):
        validate(BatchShape.C(**shape))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 1000), max_size=50), st.integers(1, 6))
def test_ranks_get_every_bag_once_and_like_costs(costs, parts):
    """No rank has more than another but for one bag: that of its last one."""
    shares = balance(costs, parts)
    assert len(shares) == parts
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[number] for number in share) for share in shares]
    for share, load in zip(shares, loads, strict=True):
        assert not share or load - min(costs[number] for number in share) <= min(loads)
