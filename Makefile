# Two commands do most of it: `make demo` and `make test`. `make` alone lists them all.
# More words for the tool behind a target: make test ARGS="-k tuning". Another Python: make setup PYTHON=python3.12

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
UV := build/lock/bin/uv
UV_VERSION := 0.13.8
ARGS ?=
# A process for each core, to some degree; the tests of a file stay together, for what they share.
SIDE_BY_SIDE := -n auto --maxprocesses 4 --dist loadfile

# The first of these that csdctl can run on; python3 when none can, so that the message names it.
IS_USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(IS_USABLE)' 2>/dev/null && echo $$python && exit; done; echo python3)

.PHONY: help setup demo test lab check bench lock build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-6s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## make .venv with csdctl and its locked dependencies

demo: $(STAMP) ## train on an emulated fleet on this machine
	@$(BIN)/csdctl demo $(ARGS)

test: $(STAMP) ## run all tests, side by side
	@$(BIN)/pytest $(if $(ARGS),$(ARGS),$(SIDE_BY_SIDE))

lab: $(STAMP) ## the tests with network namespaces and real SSH servers alone; root on Debian
	@$(BIN)/pytest tests/lab $(ARGS)

check: $(STAMP) ## lint, formatting, types, import rules, docs
	@echo "== ruff check";        $(BIN)/ruff check .
	echo "== ruff format --check"; $(BIN)/ruff format --check .
	echo "== mypy";                $(BIN)/mypy
	echo "== lint-imports";        $(BIN)/lint-imports --no-logo --no-cache
	echo "== docs";                $(BIN)/pytest -q tests/unit/test_docs.py

bench: $(STAMP) ## measure; prints numbers and judges nothing
	@$(BIN)/pytest -s tests/bench $(ARGS)

lock: $(UV) ## resolve requirements/*.txt again (newer versions: make lock ARGS=--upgrade)
	@run() {
	  $(UV) pip compile pyproject.toml --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS) "$$@"
	}
	echo "requirements/runtime.txt: csdctl alone"
	run --output-file requirements/runtime.txt
	echo "requirements/dev.txt: with the emulator, the accountant and the tools"
	run --output-file requirements/dev.txt --extra emulator --extra privacy --group dev --constraints requirements/runtime.txt

build: $(STAMP) ## a wheel, in dist/
	@$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	ls dist/*.whl

clean: ## remove .venv, dist and caches; what csdctl wrote (.csdctl) stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): requirements/dev.txt pyproject.toml
	@python="$(PYTHON)"
	fail() { printf '%s\n' "$$@" >&2; exit 1; }
	command -v "$$python" >/dev/null || fail "There is no $$python here; csdctl needs Python 3.11, 3.12 or 3.13." \
	  "  → install one (Debian: apt-get install python3 python3-venv), or name it: make setup PYTHON=/path/to/python3.11"
	"$$python" -c '$(IS_USABLE)' || fail "$$python is $$("$$python" -V 2>&1); csdctl needs Python 3.11, 3.12 or 3.13." \
	  "  → name one: make setup PYTHON=/path/to/python3.11"
	"$$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$$python cannot make virtual environments." \
	  "  → install its venv package (Debian: apt-get install python3-venv)"
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
	  echo "Making $(VENV) with $$("$$python" -V 2>&1)"
	  "$$python" -m venv --clear $(VENV)
	fi
	pip=($(BIN)/python -m pip --disable-pip-version-check --no-input install)
	total=$$(grep -c '^[a-z].*==' requirements/dev.txt)
	echo "Installing $$total locked packages (TensorFlow is the large one: 250 MB; some minutes the first time)"
	if [ -t 1 ]; then
	  "$${pip[@]}" --progress-bar off --require-hashes -r requirements/dev.txt | awk -v total="$$total" '
	    /^(Collecting|Processing|Requirement already|Ignoring)/ { printf "\r\033[K  %d of %d", ++n, total }
	    /^Installing collected/ { printf "\r\033[K  unpacking" }
	    { fflush() }
	    END { printf "\r\033[K" }'
	else
	  "$${pip[@]}" --quiet --require-hashes -r requirements/dev.txt
	fi
	echo "Installing csdctl itself"
	"$${pip[@]}" --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

$(UV):
	@python3 -m venv build/lock
	build/lock/bin/python -m pip --disable-pip-version-check install --quiet uv==$(UV_VERSION)
