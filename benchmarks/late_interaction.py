"""Peak memory of a step of late interaction with every document of the batch, against an einsum.

    python benchmarks/late_interaction.py

256 queries of 32 tokens, 1,024 documents of 128, width 128, float32, the ranked form: what an exact step, forward and
backward from given token vectors, adds to the peak of a process of its own; and what the forward pass of ColBERT's
einsum adds, which alone takes 4 GiB. First a small case is compared with the einsum, loss and gradients, in float64.
Exits with 1 when a step takes more than a fifth of the einsum. On two cores it takes about a minute.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys

import torch
from torch import Tensor
from torch.nn.functional import normalize, softplus

from xpmir_uform import Bag, Batch, Item, LateInteractionLoss, Negatives, Side
from xpmir_uform.losses.base import Answers
from xpmir_uform.reports.tables import table
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step

QUERIES, QUERY_TOKENS, DOCUMENTS, DOCUMENT_TOKENS, WIDTH = 256, 32, 1024, 128, 128
TARGET = 0.2


class Case:
    """Bags of one query and its documents, the first of which it attracts; and token vectors of them all."""

    def __init__(self, queries: int, documents: int, dtype: torch.dtype = torch.float32) -> None:
        each = documents // queries
        bags = [
            Bag((Item.text(f"q{q}", side=Side.QUERY), *documents_of(q, each)), attract=((0, 1),))
            for q in range(queries)
        ]
        self.batch = Batch.of(bags)
        self.kept = [QUERY_TOKENS, *[DOCUMENT_TOKENS] * each] * queries
        generator = torch.Generator().manual_seed(0)
        vectors = torch.randn(sum(self.kept), WIDTH, generator=generator, dtype=dtype)
        self.vectors = normalize(vectors, dim=1).requires_grad_()
        self.loss = LateInteractionLoss.C(negatives=Negatives.AMBIENT, max_query_span=QUERY_TOKENS).instance()
        self.queries, self.each = queries, each

    def step(self) -> Tensor:
        """The exact step; its loss."""
        part = Microbatch(None, torch.arange(len(self.batch)))
        share = Share(self.batch, [range(len(self.batch))], [part], kept=self.kept)
        engine = Engine(lambda _: Answers(tokens=self.vectors), torch.Tensor.backward)
        return exact_step(engine, share, [self.loss])["late_interaction"].value

    def einsum(self) -> Tensor:
        """The loss as one writes it: all products at once."""
        grouped = self.vectors.view(self.queries, -1, WIDTH)
        queries = grouped[:, :QUERY_TOKENS]
        documents = grouped[:, QUERY_TOKENS:].reshape(-1, DOCUMENT_TOKENS, WIDTH)
        scores = torch.einsum("qtw,dsw->qtds", queries, documents).max(-1).values.mean(1)
        scores = self.loss.inverse_temperature * scores
        named = torch.arange(self.queries) * self.each
        others = torch.ones_like(scores, dtype=torch.bool).scatter_(1, named[:, None], False)
        losses = softplus(scores - scores.gather(1, named[:, None]))
        return (losses * others).sum(1).mean() / (scores.shape[1] - 1)


def documents_of(query: int, count: int) -> list[Item]:
    """The documents of a query."""
    return [Item.text(f"d{query}-{number}", side=Side.DOCUMENT) for number in range(count)]


def check() -> None:
    """Refuses to go on unless a small step is the einsum, with its gradients."""
    case = Case(6, 24, torch.float64)
    found, value = case.step(), case.einsum()
    torch.testing.assert_close(found.double(), value.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(case.vectors.grad, torch.autograd.grad(value, case.vectors)[0], rtol=1e-10, atol=1e-15)


def growth(call: str) -> float:
    """MiB that one call adds to the peak of this process."""
    small = Case(2, 8)
    getattr(small, call)()
    case = Case(QUERIES, DOCUMENTS)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with torch.set_grad_enabled(call == "step"):
        getattr(case, call)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def measure(call: str) -> float:
    """The growth of a process of its own."""
    answer = subprocess.run([sys.executable, __file__, "--call", call], capture_output=True, text=True)
    if answer.returncode:
        raise SystemExit(f"{call}: {answer.stderr.strip()}")
    return json.loads(answer.stdout)


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--call", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(2)
    if options.call:
        print(json.dumps(growth(options.call)))
        return
    check()
    step, einsum = measure("step"), measure("einsum")
    ratio = step / einsum
    print(f"{platform.machine()}, torch {torch.__version__}, 2 threads")
    vectors = (QUERIES * QUERY_TOKENS + DOCUMENTS * DOCUMENT_TOKENS) * WIDTH * 4 / 2**20
    print(
        table(
            ["token vectors, MiB", "step, MiB", "einsum forward, MiB", "ratio", "at most"],
            [[f"{vectors:.0f}", f"{step:.0f}", f"{einsum:.0f}", f"{ratio:.3f}", f"{TARGET}"]],
        )
    )
    sys.exit(ratio > TARGET)


if __name__ == "__main__":
    main()
