# make demo: run the demo on this machine. make test: run all tests. Both set up .venv on first use.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
SOURCES := hsx_dist benchmarks examples ray_jobs scripts tests

.DEFAULT_GOAL := help
.PHONY: help setup demo demo-s3 check test trainers bench bench-full pages matrix gpu soak tables docs screenshots lock clean

help:  ## print this list
	@sed -n 's/^\([a-z0-9-]*\):.*## /\1	/p' Makefile

setup: $(READY)  ## create .venv from the locked requirements

$(READY): requirements/dev.lock pyproject.toml scripts/setup.sh
	scripts/setup.sh $(PYTHON)
	@touch $@

demo: $(READY)  ## extract hidden states of SmolLM2 into runs/demo on a local Ray cluster, check them, and write a report
	$(BIN)/python -m scripts.demo

demo-s3: $(READY)  ## the same with a local S3 server as the store
	$(BIN)/python -m scripts.demo --s3

check: $(READY)  ## lint, format, types, language, quick unit tests: about two minutes
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/mypy
	$(BIN)/pytest -q -n 2 -m "not slow and not soak" tests/unit

test: $(READY)  ## all tests with real vLLM, Ray, S3 and GCS servers: half an hour to an hour
	$(BIN)/python -m compileall -q $(SOURCES)  # with PYTHONDONTWRITEBYTECODE set, each child process would compile them again
	$(BIN)/pytest -q -n 2 -m "not soak" tests/unit
	$(BIN)/python -m scripts.trainers
	$(BIN)/pytest -n 2 --dist loadfile -m "not pages and not soak" tests/integration

trainers: $(READY)  ## train with SAELens, dictionary_learning, ModelOpt and SpecForge on our files, in a separate environment
	$(BIN)/python -m scripts.trainers

bench: $(READY)  ## run the short choice of every benchmark; update benchmarks/results/bench.md and README's figures
	$(BIN)/python -m benchmarks.bench
	$(BIN)/python -m scripts.tables

bench-full: $(READY)  ## run the full choice of every benchmark (hours); update all tables in benchmarks/results
	$(BIN)/python -m benchmarks.bench --full

pages: $(READY)  ## run the commands and snippets of README and docs/ in order, as a reader would
	$(BIN)/pytest tests/integration/test_documentation.py

soak: $(READY)  ## long random tests: hostile parts, all points of all models, variants of tests, orders of events, and an hour of killed writers (MINUTES=60)
	$(BIN)/python -m tests.soak.run
	$(BIN)/python -m tests.soak.points
	$(BIN)/python -m tests.soak.compiled_taps
	$(BIN)/python -m tests.soak.smollm2_points
	HSX_ALL_TAPS=1 $(BIN)/pytest -q tests/integration/test_taps.py
	$(BIN)/pytest -q -n 2 --dist loadfile -m soak tests/unit tests/integration
	HSX_PREEMPTIONS=2 $(BIN)/pytest -q -n 2 --timeout 7200 tests/unit/protocol
	HSX_SEEDS=100 $(BIN)/pytest -q -n 2 --timeout 7200 tests/unit/device
	$(BIN)/python -m scripts.soak_pool --minutes $(or $(MINUTES),60) --tally benchmarks/results/soak-pool.json

matrix: $(READY)  ## run the connector's tests on every tested vLLM and both model runners; update the table in docs/connector.md
	$(BIN)/python -m scripts.matrix

gpu:  ## run all checks for a GPU in under 20 minutes, without a GPU those for a CPU; write gpu-report.html and gpu-report.json
	$(PYTHON) scripts/gpu.py

docs: $(READY)  ## build the documentation in docs/_build/html; warnings are errors
	$(BIN)/sphinx-build -W --keep-going -q -b html -d docs/_build/doctrees docs docs/_build/html

screenshots: $(READY)  ## take the pictures of docs/guides/watching.md with Debian's Chromium
	$(BIN)/python -m scripts.screenshots

tables: $(READY)  ## write the generated texts: metrics in docs/operations.md, dashboards/, figures and chart in README
	$(BIN)/python -m scripts.tables

lock: $(READY)  ## compile requirements/dev.lock from dev.in and overrides.txt
	cd requirements && ../$(BIN)/uv pip compile dev.in --override overrides.txt $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
	    $(if $(PIP_FIND_LINKS),,--torch-backend cpu) --python-version 3.11 --no-header --quiet --output-file dev.lock

clean:  ## remove all build outputs and environments; keep runs
	rm -rf .venv .matrix .trainers .gpu build dist docs/_build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find $(SOURCES) -name __pycache__ -type d -prune -exec rm -rf {} +
