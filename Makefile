# make demo: the main job on this machine. make test: all tests. Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := hsx_dist benchmarks examples ray_jobs scripts tests

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-s3 check test trainers bench bench-full pages matrix gpu soak tables docs screenshots lock clean

help:  ## this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1	/p' Makefile

setup: $(READY)  ## .venv from the locked requirements

$(READY): requirements/dev.lock pyproject.toml scripts/setup.sh
	scripts/setup.sh $(PYTHON)
	@touch $@

demo: $(READY)  ## extract hidden states of SmolLM2 into runs/demo on a local Ray cluster, check them, write a report
	$(BIN)/python -m scripts.demo

demo-s3: $(READY)  ## the same into an S3 server that it starts and ends
	$(BIN)/python -m scripts.demo --s3

check: $(READY)  ## lint, format, types, language, quick unit tests: about two minutes
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 -m "not slow" tests/unit

test: $(READY)  ## all tests, with real vLLM, Ray, S3 and GCS servers
	$(BIN)/pytest -q -n 2 tests/unit
	$(BIN)/python -m scripts.trainers
	$(BIN)/pytest -n 2 --dist loadfile -m "not pages" tests/integration

trainers: $(READY)  ## SAELens, dictionary_learning, ModelOpt and SpecForge, in an environment of their own, train on what we read and write
	$(BIN)/python -m scripts.trainers

bench: $(READY)  ## every benchmark, a short choice of each: benchmarks/results/bench.md, and README's figures
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m scripts.tables

bench-full: $(READY)  ## all of every benchmark (hours); each writes its own table too
	$(BIN)/python -m benchmarks.bench --full

pages: $(READY)  ## README's and the pages' commands and snippets, run in order as a reader would
	$(BIN)/pytest tests/integration/test_documentation.py

soak: $(READY)  ## hostile parts and claims, a million tokens of points, every point of every model, orders of events in runs, and an hour of writers killed at random (MINUTES=60)
	$(BIN)/python -m tests.soak.run
	$(BIN)/python -m tests.soak.points
	$(BIN)/python -m tests.soak.compiled_taps
	HSX_ALL_TAPS=1 $(BIN)/pytest -q tests/integration/test_taps.py
	HSX_PREEMPTIONS=2 $(BIN)/pytest -q -n 2 --timeout 7200 tests/unit/protocol
	HSX_SEEDS=100 $(BIN)/pytest -q -n 2 --timeout 7200 tests/unit/device
	$(BIN)/python -m scripts.soak_pool --minutes $(or $(MINUTES),60) --tally benchmarks/results/soak-pool.json

matrix: $(READY)  ## the connector's tests on every tested vLLM, both model runners; the table goes to docs/
	$(BIN)/python -m scripts.matrix

gpu:  ## what a GPU proves, in under 20 minutes: gpu-report.html and gpu-report.json; without a GPU, what a CPU can
	$(PYTHON) scripts/gpu.py

docs: $(READY)  ## the documentation's site in docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html

screenshots: $(READY)  ## the pictures of docs/guides/watching.md, with Debian's Chromium
	$(BIN)/python -m scripts.screenshots

tables: $(READY)  ## generated and kept: metrics in docs/operations.md, dashboards/, figures and chart in README
	$(BIN)/python -m scripts.tables

lock: $(READY)  ## requirements/dev.lock from dev.in and overrides.txt
	cd requirements && ../$(BIN)/uv pip compile dev.in --override overrides.txt $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
	    $(if $(PIP_FIND_LINKS),,--torch-backend cpu) --python-version 3.11 --no-header --quiet --output-file dev.lock

clean:  ## everything that is made here, the environment too; runs stay
	rm -rf .venv .matrix .trainers .gpu build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
