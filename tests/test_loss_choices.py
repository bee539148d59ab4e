"""ChoicesLoss: what is asked, what is refused, and what a model learns by it."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from xpm_torch import Random

from xpmir_uform import (
    Bag,
    BagSampler,
    BagSource,
    Batch,
    BatchShape,
    ByteHead,
    ChoicesLoss,
    ContrastiveLoss,
    CosineSchedule,
    Item,
    PooledHead,
    UFormBatcher,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    adamw,
)
from xpmir_uform.base.configuration import validate
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.targets import Questions
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.losses.base import Answers
from xpmir_uform.losses.choices import hits
from xpmir_uform.model import pack

WORDS = "ant bee cow doe elk fox gnu hen ibex jay koi lynx mole newt orca puma quail ram seal toad".split()
INF = float("inf")


def encoder(seed=0, **params):
    config = UFormEncoder.C(**{"depth": 1, "hidden": 128, "bytes": ByteHead.C(), "seed": seed, **params})
    model = config.instance()
    model.initialize()
    return model


def offering(text, choices=b"yn", targets=(0.5, 0.5), **others):
    return Item.text(text, choices=choices, targets=targets, **others)


def questions(*items):
    loss = ChoicesLoss.C().instance()
    segments = [loss.ask(decode(item, {}), item, 0, 0) for item in items]
    return segments, Questions.of(segments, [item for item in items if item.choices])


def test_an_answer_slot_is_asked_of_items_that_offer_choices_alone():
    segments, asked = questions(Item.text("plain"), offering("a"), Item.text(""), offering("", b"xyz", (0.2, 0.3, 0.5)))
    assert [segment.answers for segment in segments] == [False, True, False, True]
    assert asked.choice_offsets.tolist() == [0, 2, 5]
    assert ChoicesLoss.C().instance().counts(asked).tolist() == [2.0]


@pytest.mark.parametrize("backend", ["reference", "chunked"])
def test_a_part_of_a_batch_by_hand(backend):
    """Logits [2, 1, -inf] for targets [0.7, 0.3, 0] cost 0.613262; this part has one of the four items that offer."""
    _, asked = questions(offering("a", b"abc", (0.7, 0.3, 0.0)))
    logits = torch.full((1, 256), 9.0, dtype=torch.float64)
    logits[0, [97, 98, 99]] = torch.tensor([2.0, 1.0, -INF], dtype=torch.float64)
    logits.requires_grad_()
    loss = ChoicesLoss.C(backend=backend).instance()
    value = loss.compute(Answers(choices=logits), asked, torch.tensor([4.0]))
    assert value.value.item() == pytest.approx(0.613262 / 4, abs=1e-6)
    assert value.stats == {"accuracy": 0.25, "asked": 1.0}
    (gradient,) = torch.autograd.grad(value.value, logits)
    assert gradient[0, [97, 98, 99]].tolist() == pytest.approx([0.031059 / 4, -0.031059 / 4, 0.0], abs=1e-6)
    assert gradient.count_nonzero() == 2


def test_hits_are_counted_among_legal_bytes_alone():
    logits = torch.zeros(4, 256)
    logits[:, 255] = 100.0
    logits[0, 3], logits[1, 4] = 1.0, 1.0
    choices = torch.tensor([3, 4, 3, 4, 7], dtype=torch.uint8)
    targets = torch.tensor([0.9, 0.1, 0.9, 0.1, 1.0])
    assert hits(logits, choices, torch.tensor([0, 2, 4, 4, 5]), targets).item() == 2
    # Of t bytes that are equally likely, one is picked with probability 1 / t; any of equal targets is right.
    alike, four = torch.zeros(3, 256), torch.tensor([7, 8, 9, 3, 4, 1, 2], dtype=torch.uint8)
    wanted = torch.tensor([0.2, 0.5, 0.3, 1.0, 0.0, 0.5, 0.5])
    assert hits(alike, four, torch.tensor([0, 3, 5, 7]), wanted).item() == pytest.approx(1 / 3 + 1 / 2 + 1)
    assert hits(torch.full_like(alike, -INF), four, torch.tensor([0, 3, 5, 7]), wanted).item() == pytest.approx(11 / 6)
    assert hits(torch.full_like(alike, math.nan), four, torch.tensor([0, 3, 5, 7]), wanted).item() == 0
    assert hits(logits[:0], choices[:0], torch.tensor([0]), targets[:0]).item() == 0


@pytest.mark.parametrize(
    ("choices", "targets", "message"),
    [
        (b"aba", (0.2, 0.3, 0.5), "has choices b'aba'; they must be distinct bytes"),
        (b"ab", (), "has 2 choices and no targets; give each choice one target"),
        (b"ab", (1.0,), "has 2 choices and 1 targets"),
        (b"ab", (0.0, 0.0), "has targets that sum to 0; they must sum to one"),
        (b"ab", (0.5, 0.498), "has targets that sum to 0.998; they must sum to one"),
        (b"ab", (1.5, -0.5), "has the target -0.5"),
        (b"ab", (math.nan, 1.0), "has the target nan"),
        (b"a", None, "has the target None"),
        (b"ab", 1.0, "has 2 choices and 1 targets"),
    ],
)
def test_impossible_choices_are_refused_by_key(choices, targets, message):
    with pytest.raises(ValueError, match=rf"item (1 \(key )?0x000000000000002a,? \(?text, 3 bytes\) {message}"):
        Batch.of([Bag((Item.text("one"), offering("two", choices, targets, key=42)))])


def test_targets_that_nearly_sum_to_one_are_taken():
    assert len(Batch.of([Bag((offering("a", b"ab", (0.5, 0.4995)),))])) == 1


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list, lambda row: torch.as_tensor(row).half()])
def test_a_row_of_probabilities_is_taken_as_targets(kind):
    row = np.array([0.125, 0.375, 0.5], np.float32)
    item = offering("a", b"xyz", kind(row))
    assert item.targets == (0.125, 0.375, 0.5)
    assert Batch.of([Bag((item,))]).item(0) == item
    assert hash(item) == hash(replace(item))


def test_a_single_probability_is_taken_as_the_target_of_a_single_choice():
    assert offering("a", b"x", torch.tensor(1.0)).targets == (1.0,)


class Riddles(BagSource):
    """Every bag a word, asked for its last letter, and a copy that is not asked."""

    __xpmid__ = "test.riddles"

    def __len__(self):
        return len(WORDS)

    def bag(self, index, seed, epoch):
        """The word at ``index``; of the letters, that one has probability 1."""
        word = WORDS[index]
        letters = bytes(sorted({*b"xyz", ord(word[-1])}))
        targets = tuple(float(letter == ord(word[-1])) for letter in letters)
        return Bag.alike([offering(word, letters, targets), Item.text(word + "!")])


def learner(shape, **params):
    return UFormLearner.C(
        **{
            "random": Random.C(seed=3),
            "model": UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16), bytes=ByteHead.C()),
            "trainer": UFormTrainer.C(
                sampler=BagSampler.C(source=Riddles.C()),
                batch_size=len(WORDS),
                losses=[ContrastiveLoss.C(weight=0.1), ChoicesLoss.C()],
                batcher=UFormBatcher.C(shape=shape),
            ),
            "max_epochs": 1,
            "steps_per_epoch": 60,
            "optimizers": adamw(CosineSchedule.C(learning_rate=3e-3)),
            "listeners": [],
            **params,
        }
    )


def test_choose_after_training_on_degenerate_targets_answers_them(tmp_path, execute):
    config = learner(BatchShape.C(bags=7, max_choices_per_item=4))
    validate(config)
    trained = execute(config, tmp_path).model
    items = [Riddles.C().instance().bag(index, 0, 0).items[0] for index in range(len(WORDS))]
    rows = trained.choose(items)
    for item, row in zip(items, rows, strict=True):
        assert float(row[item.targets.index(1.0)]) > 0.99, item


def test_an_item_with_too_many_choices_is_refused_by_key(tmp_path, execute):
    keys = "|".join(f"{Item.text(word).key:#018x}" for word in WORDS)
    message = rf"item 0 \(key ({keys}), text, \d bytes\) offers 4 choices and max_choices_per_item .* is 3: raise it"
    with pytest.raises(ValueError, match=message):
        execute(learner(BatchShape.C(max_choices_per_item=3), steps_per_epoch=2), tmp_path)


def test_a_batch_shape_without_the_limit_is_refused():
    message = r"ChoicesLoss needs the limit 'max_choices_per_item' .* batcher=UFormBatcher\.C\(shape=BatchShape\.C"
    for batcher in (UFormBatcher.C(), UFormBatcher.C(shape=BatchShape.C(bags=2))):
        config = learner(None)
        config.trainer.batcher = batcher
        with pytest.raises(ValueError, match=message):
            validate(config)


def test_limit_and_back_end_are_left_out_of_the_identifier():
    def identifier(limit, **params):
        config = learner(BatchShape.C(max_choices_per_item=limit))
        config.trainer.losses = [ChoicesLoss.C(**params)]
        return config.__xpm__.identifier.all

    assert identifier(4) == identifier(9, backend="reference")
    assert identifier(4) != identifier(4, weight=2.0)


def test_a_model_without_the_head_is_refused(tmp_path, execute):
    model = UFormEncoder.C(depth=1, hidden=128, pooled=PooledHead.C(width=16))
    with pytest.raises(ValueError, match="ChoicesLoss needs the head 'bytes'"):
        execute(learner(BatchShape.C(max_choices_per_item=4), model=model), tmp_path)


def entropy(rows):
    return float(sum(-(row.double() * row.double().log()).sum() for row in rows) / len(rows))


def test_a_teachers_answers_lower_the_students_divergence_all_the_way():
    """Full batches, so that the loss less the teacher's entropy is KL(teacher || student) of the whole set."""
    teacher, student = encoder(seed=1), encoder(seed=2)
    teacher.byte_decoder.weight.data.mul_(3.0)
    choices = [b"ynm"[: 2 + len(word) % 2] for word in WORDS]
    told = teacher.choose(WORDS, choices)
    items = [offering(*three) for three in zip(WORDS, choices, told, strict=True)]
    Batch.of([Bag((item,)) for item in items])
    segments, asked = questions(*items)
    loss = ChoicesLoss.C().instance()
    optimizer = torch.optim.Adam(student.parameters(), lr=3e-4)
    divergence = []
    for _ in range(200):
        answers = Answers(*student(pack(segments))[1:])
        value = loss.compute(answers, asked, loss.counts(asked)).value
        divergence.append(value.item() - entropy(told))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    smooth = np.mean(np.reshape(divergence, (20, 10)), axis=1)
    assert (np.diff(smooth) < 0).all(), smooth
    assert smooth[-1] < 0.02 * smooth[0]
    found = student.choose(WORDS, choices)
    pairs = zip(told, found, strict=True)
    apart = np.mean([float((p.double() * (p.double() / q.double()).log()).sum()) for p, q in pairs])
    assert 0 <= apart <= divergence[-1] + 1e-6


def test_offering_choices_changes_no_embedding():
    model = encoder(pooled=PooledHead.C(width=16))
    segments, _ = questions(offering("one"), Item.text("two"), offering("three"))
    plain = [Segment(Modality.TEXT, segment.values, segment.grid) for segment in segments]
    with torch.no_grad():
        torch.testing.assert_close(model(pack(segments)).embeddings, model(pack(plain)).embeddings)
