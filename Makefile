# Every target sets itself up: a fresh clone needs nothing but Python 3.11+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
QUICK := not exact and not gpu
export PIP_DISABLE_PIP_VERSION_CHECK := 1

.DEFAULT_GOAL := help
.PHONY: help setup model demo serve test test-exact fuzz lint format peers soak heads heads-install clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)  ## create .venv with the locked packages

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Outrider needs Python 3.11 or newer; try: make PYTHON=python3.11 $(MAKECMDGOALS)"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the locked packages into $(VENV) (about a minute) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

model: $(READY)
	@$(BIN)/outrider models pull smollm2-135m-instruct

demo: model  ## plain decoding and every way to draft side by side (6 minutes)
	@$(BIN)/outrider demo

serve: model  ## the embedded model behind OpenAI's API on http://127.0.0.1:8000
	@$(BIN)/outrider serve

test: model  ## the tests (under 15 minutes on 2 cores)
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile -m "$(QUICK) and not alone"
	@$(BIN)/python -m pytest -m "$(QUICK) and alone"

test-exact: model  ## the long exactness suite on the embedded model
	@$(BIN)/python -m pytest -m exact

fuzz: $(READY)  ## 100,000 made-up requests to a live server (an hour)
	@OUTRIDER_FUZZ_CASES=100000 $(BIN)/python -m pytest -q tests/server/test_fuzz.py

lint: $(READY)  ## ruff, pyright, import-linter
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(BIN)/pyright --warnings
	@$(BIN)/lint-imports --no-cache

format: $(READY)  ## apply ruff's format and safe fixes
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

peers: model  ## our decoding beside transformers' generate
	@$(BIN)/python benchmarks/peers.py

soak: model  ## a server at twice its capacity, a storm of clients, SIGTERM, SIGKILL (12 minutes)
	@$(BIN)/python benchmarks/soak.py

heads: model  ## train the embedded model's heads from the prompt book (hours)
	@OUTRIDER=$(BIN)/outrider sh scripts/heads.sh train

heads-install:  ## put trained heads into the package
	@sh scripts/heads.sh install

clean:  ## remove the environment and caches (not the downloaded model, not trained heads)
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build/lib build/bdist.* src/*.egg-info
