# `make demo` and `make test` are the two to start with. `make` alone lists all targets.
# ARGS passes arguments on to the tool: make test ARGS="-k tuning". Another Python: make setup PYTHON=python3.12

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.ONESHELL:
.DELETE_ON_ERROR:

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS := build/docs
AUDIT := build/audit
PROVISION := build/provision
NEWEST := build/newest
LOWEST := build/lowest
UV := build/lock/bin/uv
UV_VERSION := 0.13.8
ARGS ?=
# Emulated and lab tests mostly wait, so there are more processes than cores. The tests of a file stay in one
# process, for the fixtures they share. Files start in the order of tests/conftest.py and `testpaths`, the longest first; xdist would
# otherwise begin with the files that have most tests.
WORKERS ?= $(shell cores=$$(nproc); echo $$((cores < 6 ? cores + 2 : 8)))
IN_PARALLEL := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Tests start csdctl hundreds of times. With PYTHONDONTWRITEBYTECODE, as in containers, each would compile itself: 0.3 s.
COMPILE := $(BIN)/python -m compileall -q -j 0 csdctl
PIP_INSTALL := -m pip --disable-pip-version-check --no-input install
# A lock file is complete, so pip resolves nothing. Before 23.3, pip's resolver took the newest release of a package that another
# one requires with an extra, and refused it for want of a hash: every set-up failed on the day of a new release.
INSTALL_LOCK := $(PIP_INSTALL) --no-deps --require-hashes

# The first of these that csdctl can run on; python3 if there is none, so that the error message names it.
IS_USABLE := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON = $(shell for python in python3 python3.13 python3.12 python3.11; do \
	$$python -c '$(IS_USABLE)' 2>/dev/null && echo $$python && exit; done; echo python3)

.PHONY: help setup demo test test-all test-provision test-aarch64 lint-ansible lab fuzz soak check bench coverage lowest newest docs audit lock build clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "make %-14s  %s\n", $$1, $$2 }' Makefile

setup: $(STAMP) ## create .venv with csdctl and its locked dependencies

demo: $(STAMP) ## train on an emulated fleet
	@$(BIN)/csdctl demo $(ARGS)

test: $(STAMP) ## run the tests, in parallel, without the thorough ones: a quarter of an hour
	@$(COMPILE)
	$(BIN)/pytest $(if $(ARGS),$(ARGS),$(IN_PARALLEL))

test-all: $(STAMP) ## run all tests, in parallel
	@$(COMPILE)
	$(BIN)/pytest --thorough $(if $(ARGS),$(ARGS),$(IN_PARALLEL))

lab: $(STAMP) ## run only the tests with network namespaces and OpenSSH servers; root on Debian
	@$(BIN)/pytest tests/lab $(ARGS)

test-provision: $(STAMP) $(PROVISION)/.installed ## provision bare nodes of the lab, train on them, uninstall; root on Debian, minutes
	@PATH="$$PATH:$(CURDIR)/$(PROVISION)/bin" $(BIN)/pytest tests/provision $(ARGS)

test-aarch64: $(STAMP) $(PROVISION)/.installed ## the same for an emulated Cortex-A53, with this host in one job; a quarter of an hour
	@PATH="$$PATH:$(CURDIR)/$(PROVISION)/bin" $(BIN)/pytest -s tests/aarch64 $(ARGS)

lint-ansible: $(PROVISION)/.installed ## check ansible/ against ansible-lint's production profile
	@cd ansible && PATH="$(CURDIR)/$(PROVISION)/bin:$$PATH" ansible-lint --offline --profile production $(ARGS)

fuzz: $(STAMP) ## try changed inputs on everything that csdctl reads from others: INPUTS for each kind, from SEED
	@FUZZ_INPUTS=$(or $(INPUTS),3000) FUZZ_SEED=$(or $(SEED),1) $(BIN)/pytest tests/fuzz $(ARGS)

soak: $(STAMP) ## train under faults for MINUTES from SEED on the FLEET emulated or lab; root on Debian
	@$(BIN)/python -m tests.soak.soak --fleet $(or $(FLEET),lab) --seconds $$((60 * $(or $(MINUTES),5))) --seed $(or $(SEED),1) $(ARGS)

check: $(STAMP) ## check style, formatting, types, import rules, docs and licences
	@echo "== ruff check";        $(BIN)/ruff check .
	echo "== ruff format --check"; $(BIN)/ruff format --check .
	echo "== mypy";                $(BIN)/mypy
	echo "== lint-imports";        $(BIN)/lint-imports --no-logo --no-cache
	echo "== tests are where one looks for them"; $(BIN)/python -m tests.places
	echo "== names and sentences"; $(BIN)/python -m tests.plain_words
	echo "== generated pages of the docs"; $(BIN)/python docs/generate.py --check
	echo "== requirements/dev.txt is complete"; $(BIN)/python -m pip check
	echo "== docs, licences";      $(BIN)/pytest -q tests/unit/test_docs.py tests/unit/requirements/test_licences.py

bench: $(STAMP) ## run the benchmarks; they print measurements and assert nothing about them
	@$(BIN)/pytest -s -o python_files='bench_*.py' benchmarks $(ARGS)

coverage: $(STAMP) ## measure the coverage of the unit tests; HTML in build/coverage
	@rm -f .coverage .coverage.* # those of killed processes may be damaged
	$(BIN)/pytest -n $(WORKERS) -q tests/unit --cov --cov-report=term --cov-report=html:build/coverage $(ARGS)

lowest: $(LOWEST)/.installed ## run the unit tests with the lowest versions that pyproject.toml allows
	@$(LOWEST)/bin/pytest -n $(WORKERS) -q tests/unit $(ARGS) \
	  --deselect tests/unit/requirements/test_licences.py::TestPage # these depend on the versions of others

newest: ## run the unit tests with the newest versions that pyproject.toml allows, whatever is locked
	@$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python $(PIP_INSTALL) --quiet --upgrade pip
	$(NEWEST)/bin/python $(PIP_INSTALL) --quiet --group test -e '.[privacy,metrics]'
	$(NEWEST)/bin/pytest -n $(WORKERS) -q tests/unit $(ARGS) \
	  --deselect tests/unit/requirements/test_licences.py::TestPage # these depend on the versions of others

docs: $(STAMP) $(DOCS)/.installed ## build the documentation site in build/site; a broken link is an error
	@$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict $(ARGS)
	if grep -rlE '<(script|link|img)[^>]*(src|href)="?(https?:)?//' build/site --include='*.html'; then
	  echo "These pages load something from elsewhere; the site must work offline." >&2; exit 1
	fi
	echo "build/site/index.html"

audit: $(AUDIT)/.installed ## look up known vulnerabilities of the versions that requirements/*.txt pin for this machine
	@for file in requirements/*.txt; do
	  echo "$$file"
	  $(AUDIT)/bin/pip-audit --strict --disable-pip --require-hashes --progress-spinner off --requirement "$$file" $(ARGS)
	done

lock: $(UV) ## resolve requirements/*.txt (newer versions: make lock ARGS=--upgrade)
	@run() {
	  $(UV) pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	    --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" $(ARGS) "$$@"
	}
	echo "requirements/runtime.txt: csdctl"
	run pyproject.toml --output-file requirements/runtime.txt
	echo "requirements/dev.txt: csdctl, its extras and the development tools"
	run pyproject.toml --output-file requirements/dev.txt --extra metrics --extra privacy --extra provision --extra report --group dev --constraints requirements/runtime.txt
	echo "requirements/docs.txt: the site generator"
	run --group docs --output-file requirements/docs.txt
	echo "requirements/audit.txt: pip-audit"
	run --group audit --output-file requirements/audit.txt
	echo "requirements/provision.txt: Ansible, for csdctl provision and its checks"
	run --group provision --output-file requirements/provision.txt
	echo "csdctl/workflows/provision/node.lock: what is sent to nodes"
	run --group node --output-file csdctl/workflows/provision/node.lock --constraints requirements/dev.txt
	echo "requirements/lowest.txt: the lowest versions that pyproject.toml allows"
	run pyproject.toml --output-file requirements/lowest.txt --resolution lowest-direct --extra metrics --extra privacy --extra provision --extra report --group test

build: $(STAMP) ## build the wheel and the source distribution in dist/
	@rm -rf dist
	$(BIN)/python -m hatchling build -d dist

clean: ## remove .venv, build, dist and caches; what csdctl wrote (.csdctl) stays
	@rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .coverage*
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): requirements/dev.txt pyproject.toml
	@python="$(PYTHON)"
	fail() { printf '%s\n' "$$@" >&2; exit 1; }
	command -v "$$python" >/dev/null || fail "$$python was not found; csdctl needs Python 3.11, 3.12 or 3.13." \
	  "  → install one (Debian: apt-get install python3 python3-venv), or name one: make setup PYTHON=/path/to/python3.11"
	"$$python" -c '$(IS_USABLE)' || fail "$$python is $$("$$python" -V 2>&1); csdctl needs Python 3.11, 3.12 or 3.13." \
	  "  → name one: make setup PYTHON=/path/to/python3.11"
	"$$python" -c 'import venv, ensurepip' 2>/dev/null || fail "$$python cannot create virtual environments." \
	  "  → install its venv package (Debian: apt-get install python3-venv)"
	if ! $(BIN)/python -m pip --version >/dev/null 2>&1; then
	  echo "Creating $(VENV) with $$("$$python" -V 2>&1)"
	  "$$python" -m venv --clear $(VENV)
	fi
	pip=($(BIN)/python $(PIP_INSTALL))
	install_lock=($(BIN)/python $(INSTALL_LOCK))
	total=$$(grep -c '^[a-z].*==' requirements/dev.txt)
	echo "Installing $$total locked packages (TensorFlow alone is 250 MB; this takes minutes the first time)"
	if [ -t 1 ]; then
	  "$${install_lock[@]}" --progress-bar off -r requirements/dev.txt | awk -v total="$$total" '
	    /^(Collecting|Processing|Requirement already|Ignoring)/ { printf "\r\033[K  %d of %d", ++n, total }
	    /^Installing collected/ { printf "\r\033[K  unpacking" }
	    { fflush() }
	    END { printf "\r\033[K" }'
	else
	  "$${install_lock[@]}" --quiet -r requirements/dev.txt
	fi
	echo "Installing csdctl"
	"$${pip[@]}" --quiet --no-deps --no-build-isolation -e .
	$(BIN)/python docs/generate.py
	touch $(STAMP)

$(LOWEST)/.installed: requirements/lowest.txt
	@echo "Installing the lowest versions in $(LOWEST)"
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python $(INSTALL_LOCK) --quiet -r requirements/lowest.txt
	$(LOWEST)/bin/python $(PIP_INSTALL) --quiet --no-deps --no-build-isolation -e .
	touch $@

$(DOCS)/.installed: requirements/docs.txt
	@$(PYTHON) -m venv --clear $(DOCS)
	$(DOCS)/bin/python $(INSTALL_LOCK) --quiet -r requirements/docs.txt
	touch $@

$(AUDIT)/.installed: requirements/audit.txt
	@$(PYTHON) -m venv --clear $(AUDIT)
	$(AUDIT)/bin/python $(INSTALL_LOCK) --quiet -r requirements/audit.txt
	touch $@

$(PROVISION)/.installed: requirements/provision.txt
	@$(PYTHON) -m venv --clear $(PROVISION)
	$(PROVISION)/bin/python $(INSTALL_LOCK) --quiet -r requirements/provision.txt
	touch $@

$(UV):
	@$(PYTHON) -m venv build/lock
	build/lock/bin/python $(PIP_INSTALL) --quiet uv==$(UV_VERSION)
