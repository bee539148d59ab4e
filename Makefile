# Each target sets up what it needs in $(VENV).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# The build of torch to install first; the package's own range would also take a newer one.
TORCH ?= torch==2.13.0
WORKSPACE ?= runs/workspace
EXPERIMENT ?= experiments/quickstart/full.yaml
# Settings of the experiment, as OPTIONS="-c verbose=true -c seed=2"
OPTIONS ?=

.PHONY: help setup quickstart test lint format bench invariance faults mutants kernels-compile docs clean

help:
	@echo "make quickstart       train, evaluate and show a small model"
	@echo "make test             run the tests"
	@echo "make lint             style, types and import layers"
	@echo "make bench            speed and memory on this machine"
	@echo "make invariance       vary what identifiers leave out, compare the weights"
	@echo "make faults           inject faults of every kind into a training, look for what is lost"
	@echo "make mutants          make mistakes on purpose, look for those that no test notices"
	@echo "make kernels-compile  compile the Triton kernels for real GPUs, without one"
	@echo "make docs             build the documentation into site/"

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/run: pyproject.toml | $(VENV)/bin/python
	$(BIN)/pip install --disable-pip-version-check "$(TORCH)"
	$(BIN)/pip install --disable-pip-version-check -e ".[demo]"
	@touch $@

$(VENV)/dev: pyproject.toml | $(VENV)/run
	$(BIN)/pip install --disable-pip-version-check -e ".[demo,demo-text,demo-audio,search,triton,dev,docs]"
	@touch $@

setup: $(VENV)/dev

quickstart: $(VENV)/run
	$(BIN)/experimaestro run-experiment --workdir $(WORKSPACE) $(OPTIONS) $(EXPERIMENT)

test: $(VENV)/dev
	$(BIN)/pytest --numprocesses auto --dist loadscope --no-loadscope-reorder

lint: $(VENV)/dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/dev
	$(BIN)/python benchmarks/encoder.py
	$(BIN)/python benchmarks/pair_loss.py
	$(BIN)/python benchmarks/maxsim.py
	$(BIN)/python benchmarks/batching.py
	$(BIN)/python benchmarks/index.py
	$(BIN)/python benchmarks/step.py
	$(BIN)/python benchmarks/late_interaction.py
	$(BIN)/python benchmarks/telemetry.py
	$(BIN)/python benchmarks/inputs.py

invariance: $(VENV)/dev
	$(BIN)/python tests/harness/invariance.py

faults: $(VENV)/dev
	$(BIN)/python tests/harness/faults

mutants: $(VENV)/dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/harness/mutants

kernels-compile: $(VENV)/dev
	$(BIN)/python tests/harness/compile_kernels.py

docs: $(VENV)/dev
	$(BIN)/mkdocs build --strict

clean:
	rm -rf $(VENV) site build dist
