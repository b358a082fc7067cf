# `make demo` shows cbatch at work, `make test` checks it. Needs Python 3.11 or newer, a C++ compiler and make;
# everything else is installed into VENV, in the exact versions of .ci/constraints.txt.

PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$python" && break; done)
VENV ?= .venv
MODELS ?= .models
DEMO ?= .demo
PYTEST_ARGS ?= -n 2 --dist loadfile

BIN := $(VENV)/bin
READY := $(VENV)/.ready
MODEL := $(MODELS)/smollm2
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint .ci/constraints.txt

.PHONY: help demo test check docs clean

help:
	@echo "make demo    fetch a small model, run a sample job on it, show the result"
	@echo "make test    check style and types, run every test (fetches the model too)"
	@echo "make check   style and types only"
	@echo "make docs    write docs/reference.md from the code"
	@echo "make clean   remove what the above installed and wrote"

demo: $(READY) $(MODEL)/model.safetensors
	@rm -rf $(DEMO) && mkdir -p $(DEMO)
	$(BIN)/cbatch run sample_jobs/ticket_labels/prompts.jsonl --config sample_jobs/ticket_labels/job.toml \
		--model $(MODEL) --output $(DEMO)/ticket_labels.jsonl
	@$(BIN)/python sample_jobs/show.py $(DEMO)/ticket_labels.jsonl text expected

test: check $(MODEL)/model.safetensors
	OMP_NUM_THREADS=1 CBATCH_TEST_MODEL=$(abspath $(MODEL)) $(BIN)/python -m pytest $(PYTEST_ARGS)

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: $(READY)
	$(BIN)/python docs/write_reference.py

clean:
	rm -rf $(VENV) $(MODELS) $(DEMO)

$(READY): pyproject.toml .ci/constraints.txt
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer found: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) setuptools
	$(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

$(MODEL)/model.safetensors: | $(READY)
	$(BIN)/python sample_jobs/fetch_model.py $(MODEL)
