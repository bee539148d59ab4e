"""The cost model: fitted on a few probes, right on shapes that it has not seen."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from xpmir_uform import ImageShape, PooledHead, UFormEncoder
from xpmir_uform.batching import memory_probe
from xpmir_uform.batching.cost import CostModel, Probe, fit
from xpmir_uform.data.decoding.segment import blank_text
from xpmir_uform.model.packing import pack

CPU = torch.device("cpu")
HELD_OUT = [(1,), (700,), (3,) * 200, (97,) * 11, (500, 400, 2, 1), tuple(range(1, 60)), (33, 34) * 20]


@pytest.fixture(scope="module")
def run():
    model = UFormEncoder.C(
        depth=2, hidden=128, pooled=PooledHead.C(width=48), image=ImageShape.C(patch_side=8, max_side=16)
    ).instance()
    model.initialize()
    return lambda lengths: model(pack([blank_text(n) for n in lengths])).embeddings.sum().backward()


def fitted(run):
    return fit(memory_probe.probe(run, memory_probe.probe_lengths(0, CPU), CPU))


def error(model, run, lengths):
    taken = memory_probe.measure(lambda: run(lengths), CPU)
    return abs(model.predict(lengths) - taken) / taken


def test_held_out_shapes_are_predicted_within_ten_percent(run):
    """On a CPU the count has no noise: the error is below a tenth of a percent."""
    model = fitted(run)
    assert max(error(model, run, lengths) for lengths in HELD_OUT) < 0.001


def test_fused_attention_saves_no_squares(run):
    model = fitted(run)
    assert model.squares * 1000**2 < 0.01 * model.tokens * 1000


def test_plain_attention_saves_squares_and_the_model_finds_them(run):
    """But for items that are alone: of them that kernel saves less, which no linear model can tell."""

    def plain(lengths):
        with sdpa_kernel(SDPBackend.MATH):
            run(lengths)

    model = fitted(plain)
    without = CostModel(model.tokens, 0.0, model.items, model.constant)
    several = [lengths for lengths in HELD_OUT if len(lengths) > 1]
    assert max(error(model, plain, lengths) for lengths in several) < 0.10
    assert max(error(without, plain, lengths) for lengths in several) > 0.10


def test_the_count_is_exact():
    weight = torch.nn.Parameter(torch.ones(8, 4))

    def run():
        x = torch.ones(16, 8)
        hidden = (x @ weight).exp()  # the product saves x and the weight, exp its result
        (hidden * hidden.view(4, 16).view(16, 4)).sum().backward()  # one storage, seen twice

    assert memory_probe.saved_bytes(run) == 4 * (16 * 8 + 16 * 4)


def test_the_count_has_no_noise(run):
    assert len({memory_probe.saved_bytes(lambda: run((9, 30, 4))) for _ in range(3)}) == 1


def test_a_linear_cost_is_recovered():
    truth = CostModel(tokens=120.0, squares=0.25, items=900.0, constant=5e4)
    probes = [Probe(lengths, round(truth.predict(lengths))) for lengths in memory_probe.probe_lengths(0, CPU)]
    assert fit(probes).predict((300, 20)) == pytest.approx(truth.predict((300, 20)), rel=1e-4)


def test_no_coefficient_is_negative():
    model = fit([Probe((10,), 1000), Probe((10,) * 2, 1000), Probe((20,), 1500), Probe((5,) * 8, 900)])
    assert min(model.tokens, model.squares, model.items, model.constant) >= 0.0


def test_json_gives_the_same_model():
    model = fit([Probe((3, 7), 997), Probe((31,), 10_007)])
    assert CostModel.from_json(model.to_json()) == model


@pytest.mark.parametrize("probes", [[], [Probe((1,), 0)]])
def test_nothing_can_be_fitted_to_nothing(probes):
    with pytest.raises(ValueError, match="at least one"):
        fit(probes)


def test_probes_keep_to_the_longest_item():
    assert max(max(lengths) for lengths in memory_probe.probe_lengths(24, CPU)) == 24
    assert min(min(lengths) for lengths in memory_probe.probe_lengths(1, CPU)) == 1


def test_a_probe_that_does_not_fit_is_left_out():
    def run(lengths):
        if sum(lengths) > 20:
            raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
        (torch.ones(sum(lengths), requires_grad=True) * torch.ones(sum(lengths))).sum().backward()

    assert [probe.lengths for probe in memory_probe.probe(run, [(10,), (30,), (4, 5)], CPU)] == [(10,), (4, 5)]


def test_a_probe_that_fails_for_another_reason_fails():
    def run(lengths):
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="do not match"):
        memory_probe.probe(run, [(10,)], CPU)


def test_the_budget_counts_what_the_allocator_holds_and_can_reuse(monkeypatch):
    gigabyte = 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (2 * gigabyte, 16 * gigabyte))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 10 * gigabyte)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4 * gigabyte)
    device = torch.device("cuda")
    assert memory_probe.budget(device, 0.5) == 0.5 * (2 + 10 - 4) * gigabyte
    assert memory_probe.budget(device, 1.0, reach=6 * gigabyte) == 2 * gigabyte


def test_a_cpu_has_no_budget_of_its_own():
    assert memory_probe.budget(CPU, 0.5) == float("inf")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_held_out_peaks_of_the_allocator_are_predicted_within_ten_percent():
    device = torch.device("cuda")
    model = UFormEncoder.C(depth=4, hidden=384, pooled=PooledHead.C(width=128)).instance()
    model.initialize()
    model.to(device)

    def run(lengths):
        model(pack([blank_text(n) for n in lengths]).to(device)).embeddings.sum().backward()

    cost = fit(memory_probe.probe(run, memory_probe.probe_lengths(0, device), device))
    kept = sum(parameter.nbytes for parameter in model.parameters())  # gradients exist by now
    for lengths in [(64,) * 400, (1000,) * 20, tuple(range(1, 200))]:
        taken = kept + memory_probe.measure(lambda lengths=lengths: run(lengths), device)
        assert cost.predict(lengths) == pytest.approx(taken, rel=0.10)
