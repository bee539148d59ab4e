"""The mutants: one plausible mistake each, and the tests that must notice it."""

from typing import NamedTuple


class Mutant(NamedTuple):
    """A mistake.

    Args:
        layer: which it is in.
        mistake: what it does.
        file: from the root of the repository.
        old: text that occurs in it exactly once.
        new: what stands there instead.
        tests: files of ``tests/`` that must notice it.
    """

    layer: str
    mistake: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


PAIR = "kernels/uform_kernels/ops/pair_loss/"
MAXSIM = "kernels/uform_kernels/ops/maxsim/"
BATTERY, FIELDS = "test_loss_battery.py", "test_fields.py"
LOSSES, DATA, MODEL = "xpmir_uform/losses/", "xpmir_uform/data/", "xpmir_uform/model/"
TRAINER, LEARNER = "xpmir_uform/trainer/", "xpmir_uform/learner/"
EVALUATION, EXPORT, INDEX = "xpmir_uform/evaluation/", "xpmir_uform/export/", "xpmir_uform/index/"
BASE, CHECKPOINTS = "xpmir_uform/base/", "xpmir_uform/checkpoints/"

# ruff: noqa: E501
# fmt: off
MUTANTS = (
    Mutant("kernels", "an anchor's own cell is ambient", PAIR + "cells.py", "return cells + _own_cells(layout, dtype), cells[:0]", "return cells, cells[:0]", ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "softplus is linear too soon", PAIR + "problem.py", "SOFTPLUS_LINEAR = 60.0", "SOFTPLUS_LINEAR = 2.0", ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "ambient cells of an anchor's own family", PAIR + "problem.py", "foreign = (families[start:stop][anchors] != families[edges.ids]) & among[edges.ids]", "foreign = among[edges.ids]", ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "the ranked form counts anchors of one kind", PAIR + "problem.py", 'return (attract > 0) & (repel > 0) if form == "ranked" else', 'return (attract > 0) | (repel > 0) if form == "ranked" else', ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "an ignored NaN makes the loss NaN", PAIR + "screen.py", "return bool((active & met).any())", "return True", ("test_kernel_screen.py",)),
    Mutant("kernels", "a NaN that counts is taken for zeros", PAIR + "screen.py", "return bool((active & met).any())", "return False", ("test_kernel_screen.py",)),
    Mutant("kernels", "a group's infinite temperature is not seen", PAIR + "screen.py", "~(temperature.isfinite() & bias.isfinite())", "~bias.isfinite()", ("test_kernel_screen.py",)),
    Mutant("kernels", "a tiny prefix shares the vector's scale", PAIR + "matryoshka.py", "LEAST_SHARE = 1e-12", "LEAST_SHARE = 0.0", ("test_kernel_screen.py",)),
    Mutant("kernels", "a level's norm takes no gradient", PAIR + "matryoshka.py", "vectors[:, : block.stop] -= pull", "vectors[:, : block.stop] -= 0 * pull", ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "a mirrored tile is counted once", PAIR + "tiles.py", "own + mirrored, 1 + tile.mirrored)", "own + mirrored, 1)", ("test_kernel_pair_loss.py",)),
    Mutant("kernels", "MaxSim is not divided by the query's tokens", MAXSIM + "packing.py", "    if normalize:\n        lengths", "    if not normalize:\n        lengths", ("test_kernel_maxsim.py",)),
    Mutant("kernels", "equal vectors keep their own gradients", MAXSIM + "screen.py", "        if not len(rows):\n            return grad, None", "        if True:\n            return grad, None", ("test_kernel_screen.py",)),
    Mutant("kernels", "-0.0 and 0.0 differ", MAXSIM + "screen.py", "return (vectors + 0.0)", "return vectors.clone()", ("test_kernel_screen.py",)),
    Mutant("kernels", "a shared hash is believed", MAXSIM + "screen.py", "torch.cat([owners[rows, None], bits_of(documents[rows])], dim=1)", "owners[rows, None]", ("test_kernel_screen.py",)),
    Mutant("kernels", "a NaN that nothing depends on spoils gradients", MAXSIM + "screen.py", "marked & (grad != 0)", "marked", ("test_kernel_screen.py",)),
    Mutant("kernels", "a choice of probability 0 costs", "kernels/uform_kernels/ops/choice_loss/chunked.py", "losses = torch.where(targets > 0, targets * (log_total - shifted), 0)", "losses = targets * (log_total - shifted)", ("test_kernel_choice_loss.py",)),
    Mutant("kernels", "huge weights are taken", "kernels/uform_kernels/checks.py", "LEAST_WEIGHT, MOST_WEIGHT = 1e-18, 1e9", "LEAST_WEIGHT, MOST_WEIGHT = 1e-18, 1e40", ("test_kernel_screen.py",)),
    Mutant("losses", "temperature groups are ignored", LOSSES + "contrastive.py", "groups=batch.groups.to(device)", "groups=None", (BATTERY,)),
    Mutant("losses", "Matryoshka levels are ignored", LOSSES + "contrastive.py", "dimensions=self.matryoshka_dimensions or None", "dimensions=None", (FIELDS,)),
    Mutant("losses", "the ambient weight is ignored", LOSSES + "contrastive.py", '"ambient_weight": self.ambient_weight,', '"ambient_weight": 1.0,', (FIELDS,)),
    Mutant("losses", "errors do not name items", LOSSES + "contrastive.py", "describe=batch.describe,", "", (BATTERY,)),
    Mutant("losses", "a listed cell of weight 0 is multiplied", PAIR + "listed.py", "    real = weights > 0\n    return (weights[real]", "    real = weights >= 0\n    return (weights[real]", ("test_loss_late_interaction.py",)),
    Mutant("losses", "a modality of weight 0 is multiplied", LOSSES + "masked.py", "return weight * mean if weight > 0 else", "return weight * mean if weight >= 0 else", ("test_loss_masked.py",)),
    Mutant("losses", "an ignored document repels", LOSSES + "late_interaction.py", "(batch.repel, repel), (batch.ignore, None)", "(batch.repel, repel)", ("test_loss_late_interaction.py",)),
    Mutant("losses", "a query is its own document", LOSSES + "late_interaction.py", "repel = (queries[:, None] != documents).to(dtype)", "repel = (queries[:, None] != documents + 1000).to(dtype)", ("test_loss_late_interaction.py",)),
    Mutant("step", "a joint loss's weight is ignored", TRAINER + "step/exact.py", "torch.stack([loss.weight * values[loss.NAME].value for loss, _ in counted.joint])", "torch.stack([values[loss.NAME].value for loss, _ in counted.joint])", (FIELDS,)),
    Mutant("step", "an additive loss's weight is ignored", TRAINER + "step/exact.py", "parts = [loss.weight * values[loss.NAME].value for loss, _ in counted.additive]", "parts = [values[loss.NAME].value for loss, _ in counted.additive]", (FIELDS,)),
    Mutant("step", "temperature and bias are carried by every microbatch", TRAINER + "step/exact.py", "        values.append(found)\n        scale = Gradient()\n", "        values.append(found)\n", ("test_step_exact.py",)),
    Mutant("step", "one microbatch is left out", TRAINER + "step/exact.py", "for microbatch in microbatches[: len(microbatches) - kept]:", "for microbatch in microbatches[1 : len(microbatches) - kept]:", ("test_step_exact.py",)),
    Mutant("loader", "the sampler's deduplicate is ignored", TRAINER + "loader.py", "deduplicate=self.sampler.deduplicate)", "deduplicate=True)", (FIELDS,)),
    Mutant("loader", "augmentation is keyed by no step", TRAINER + "loader.py", "self.augmentation.decode(item, self.shapes, self.sampler.seed, number)", "self.augmentation.decode(item, self.shapes, self.sampler.seed, 0)", ("test_data_augmentation.py",)),
    Mutant("loader", "masks are keyed by no step", TRAINER + "loader.py", "segment = loss.ask(segment, item, self.sampler.seed, number)", "segment = loss.ask(segment, item, self.sampler.seed, 0)", ("test_loss_masked.py", "test_step_masked.py")),
    Mutant("sampler", "every epoch has one order", DATA + "sampling.py", "keyed_random.permutation(seed, keyed_random.Purpose.ORDER, epoch, count)", "keyed_random.permutation(seed, keyed_random.Purpose.ORDER, 0, count)", ("test_data_sampling.py",)),
    Mutant("sampler", "bags draw by no epoch", DATA + "sampling.py", "self.source.bag(index, self.seed, epoch)", "self.source.bag(index, self.seed, 0)", ("test_data_sampling.py",)),
    Mutant("sampler", "copies of a bag do not know each other", DATA + "sampling.py", "return replace(bag, key=index) if bag.key is None else bag", "return bag", ("test_data_sampling.py",)),
    Mutant("draws", "purposes share a stream", BASE + "keyed_random.py", "np.array([0, 0, step, purpose], dtype=np.uint64)", "np.array([0, 0, step, 0], dtype=np.uint64)", ("test_data_draws.py",)),
    Mutant("draws", "items share a stream", BASE + "keyed_random.py", "key=np.array([seed, key], dtype=np.uint64)", "key=np.array([seed, 0], dtype=np.uint64)", ("test_data_draws.py",)),
    Mutant("draws", "names run into one another", BASE + "keyed_random.py", '        digest.update(len(data).to_bytes(8, "little"))\n', "", ("test_data_draws.py",)),
    Mutant("duplicates", "joined things are ignored one way", DATA + "batch/duplicates.py", "np.concatenate([np.stack([alone, alone]), joined, joined[::-1]], axis=1)", "np.concatenate([np.stack([alone, alone]), joined], axis=1)", ("test_data_duplicates.py",)),
    Mutant("duplicates", "a repel edge between duplicates is lost", DATA + "batch/duplicates.py", "np.concatenate([_codes(attract), _codes(repel)])", "_codes(attract)", ("test_data_duplicates.py",)),
    Mutant("masking", "a ratio is rounded down", LOSSES + "masking.py", "return whole + int(draw.random() < value - whole)", "return whole", ("test_data_masking.py",)),
    Mutant("decoding", "a picture's orientation is ignored", DATA + "decoding/image.py", "return picture if turn is None else picture.transpose(turn)", "return picture", ("test_data_decoding_image.py",)),
    Mutant("decoding", "unsigned sounds are not centred", DATA + "decoding/audio.py", "return values.astype(np.float32) / 128 - 1", "return values.astype(np.float32) / 128", ("test_data_decoding_audio.py",)),
    Mutant("decoding", "a sound that changes its rate is read", DATA + "decoding/audio.py", "    if before and rate != before:", "    if False:", ("test_data_decoding_audio.py",)),
    Mutant("model", "answers change the embedding", MODEL + "attention.py", "return torch.cat(results) if results else query + key + value", "return torch.cat(results[::-1]) if results else query + key + value", ("test_model_attention.py",)),
    Mutant("inference", "a query is not cut", MODEL + "inference/api.py", "replace(segment, kept=min(segment.tokens, max_span or segment.tokens))", "replace(segment, kept=segment.tokens)", ("test_model_inference.py", "test_model_heads.py")),
    Mutant("schedule", "warm-up is ignored", TRAINER + "schedule.py", "        return peak * step / warmup\n", "        return peak\n", ("test_trainer_schedule.py",)),
    Mutant("guard", "a bad loss with good gradients is stepped", LEARNER + "nonfinite.py", "    if finite and math.isfinite(norm):", "    if math.isfinite(norm):", ("test_learner_guard.py",)),
    Mutant("guard", "an overflow is excused without a scale", LEARNER + "nonfinite.py", "excused = finite and scale is not None and scale > 1.0", "excused = finite", ("test_learner_guard.py",)),
    Mutant("guard", "a short gradient is lengthened", LEARNER + "nonfinite.py", "    if not 0.0 < longest < norm:", "    if not 0.0 < longest:", ("test_learner_guard.py",)),
    Mutant("checkpoints", "another format is read", CHECKPOINTS + "manifest.py", '    if values.get("format") != FORMAT:', "    if False:", ("test_learner_checkpoints.py",)),
    Mutant("checkpoints", "damaged files are loaded", CHECKPOINTS + "manifest.py", "        if said:\n            raise Damaged(f\"{folder / name} {said}\")\n    return manifest", "    return manifest", ("test_learner_checkpoints.py",)),
    Mutant("evaluation", "the best documents come last", EVALUATION + "search.py", ".sort(dim=1, descending=True, stable=True)", ".sort(dim=1, descending=False, stable=True)", ("test_evaluation_measures.py",)),
    Mutant("evaluation", "equal scores are ordered by place", EVALUATION + "search.py", "        order = keys.argsort(dim=1)\n", "        order = torch.arange(keys.shape[1]).expand(keys.shape)\n", ("test_evaluation_measures.py",)),
    Mutant("evaluation", "a document that is its query is ranked", EVALUATION + "search.py", "listed = listed.masked_fill(listed == self.itself[queries, None], UNRANKED)", "listed = listed.clone()", ("test_evaluation_measures.py",)),
    Mutant("evaluation", "chance passes over a rank", EVALUATION + "measures.py", "for rank in range(1, min(seen, n - f + 1) + 1):", "for rank in range(1, min(seen, n - f + 1)):", ("test_evaluation_measures.py",)),
    Mutant("evaluation", "a reranker ranks every document", EVALUATION + "rankers.py", "pooled_ranking(model, order, self.first).best", "pooled_ranking(model, order, 10**6).best", ("test_evaluation_rankers.py",)),
    Mutant("evaluation", "BM25's depth of lengths is ignored", EVALUATION + "lexical.py", "bm25_ranking(order, self.k1, self.b, depth)", "bm25_ranking(order, self.k1, 0.4, depth)", (FIELDS,)),
    Mutant("index", "a shard whose offsets do not fit is opened", INDEX + "shards.py", "if len(offsets) != len(self) + 1 or int(offsets[-1]) != len(self.tensors[data]):", "if False:", ("test_index.py",)),
    Mutant("index", "vectors are not of length one", INDEX + "shards.py", 'found["pooled"] = unit(embeddings).half().cpu()', 'found["pooled"] = embeddings.half().cpu()', ("test_index.py",)),
    Mutant("export", "the program turns positions the other way", EXPORT + "program.py", "torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], dim=-1)", "torch.stack([even * cosine + odd * sine, odd * cosine - even * sine], dim=-1)", ("test_export_program.py",)),
    Mutant("export", "damaged weights are saved", EXPORT + "pretrained.py", "        if said:\n            raise ValueError(f\"{weights} {said}: it is damaged", "        if False:\n            raise ValueError(f\"{weights} {said}: it is damaged", ("test_export.py", "test_learner_outputs.py", "test_export_checkpoint.py")),
    Mutant("export", "of several best checkpoints one is taken", EXPORT + "pretrained.py", "        if step is not None or len(kept) != 1:", "        if step is not None:", ("test_export_checkpoint.py",)),
)
# fmt: on
