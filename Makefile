# Two commands: `make up`, `make down`. The rest is for who works on Baton.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.PHONY: venv deps vllm-env clients-env aiperf-env up down status protos lint format test-fast test test-unit test-registry test-clients api-cases faults clean help

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
CLIENTS := .venv-clients
AIPERF := .venv-aiperf
JS_CLIENT := openai@7.59.0
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
# Where pip finds PyTorch's builds without CUDA, for a machine that has no GPU: make up TORCH_INDEX=URL
TORCH_INDEX ?=
# What `baton up` is given: make up ARGS="--http-port 8080 --decode 2"
ARGS ?=
# An etcd that `baton fetch` brought is found by the tests, after one of the machine's own.
export PATH := $(PATH):$(CURDIR)/.baton/bin
# Compiled modules are kept whatever the shell says: tests start processes by the hundred, vLLM's compile for 10 s each.
unexport PYTHONDONTWRITEBYTECODE

help: ## what there is
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /make \1\t/' | expand -t 20

venv: $(STAMP) ## the virtual environment with everything installed

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard protos/baton/v1/*.proto)
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer on the PATH; install one, or give PYTHON=..."; exit 1; }
	@# One that was broken off while it was made has a Python, but no pip.
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV) || { echo "error: $(PYTHON) -m venv fails; on Debian: apt-get install python3-venv"; exit 1; }
	@echo "installing into $(VENV), 1.9 GB, or 6 with CUDA (some minutes the first time): torch"
	@$(PIP) install $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) -c constraints.txt torch==2.13.0 numpy
	@echo "installing NIXL (UCX)"
	@# without its dependencies: they would bring another torch
	@$(PIP) install --no-deps nixl-cu12==1.5.1
	@echo "installing the rest: gRPC, FastAPI, transformers, what tests and benches need"
	@$(PIP) install -c constraints.txt -e '.[dev,bench]'
	@touch $@

deps: venv ## what tests need and a checkout does not carry: the model, an etcd, SGLang's interface
	@$(BIN)/baton fetch
	@$(BIN)/python -m tests.sglang_wheel

vllm-env: venv ## what `--engine vllm` needs: an environment of its own (.venv-vllm, 2 GB), the model converted
	@$(BIN)/baton fetch --engine vllm

clients-env: $(CLIENTS)/.installed ## LangChain, LiteLLM and the JavaScript client, to test with (.venv-clients)

$(CLIENTS)/.installed: requirements-clients.txt Makefile
	@echo "installing clients into $(CLIENTS), 0.4 GB: LangChain, LiteLLM, the JavaScript client"
	@test -x $(CLIENTS)/bin/python || $(PYTHON) -m venv $(CLIENTS)
	@$(CLIENTS)/bin/python -m pip --disable-pip-version-check -qq install --no-deps --no-compile -r requirements-clients.txt
	@! command -v npm >/dev/null || npm install --silent --no-audit --no-fund --ignore-scripts --prefix $(CLIENTS)/js $(JS_CLIENT) || echo "no JavaScript client: npm could not install it"
	@touch $@

aiperf-env: $(AIPERF)/.installed ## the load tool aiperf with all that it needs (.venv-aiperf)

$(AIPERF)/.installed: Makefile
	@echo "installing aiperf into $(AIPERF), 0.9 GB"
	@test -x $(AIPERF)/bin/python || $(PYTHON) -m venv $(AIPERF)
	@$(AIPERF)/bin/python -m pip --disable-pip-version-check -qq install --no-compile aiperf==0.13.0
	@touch $@

up: venv ## start everything on this machine (ARGS="--http-port 8080 ...")
	@$(BIN)/baton up $(ARGS)

down: ## end everything that `make up` started
	@test ! -x $(BIN)/baton || $(BIN)/baton down

status: venv ## show each process
	@$(BIN)/baton status

protos: venv ## generate baton/v1 from protos/
	@$(BIN)/python setup.py protos

lint: venv ## ruff, mypy, import-linter
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: venv ## ruff format, and what ruff can fix
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

test-fast: venv ## unit tests that are not slow
	@$(BIN)/pytest tests/unit -m "not slow" -q

test: deps ## lint and every test: unit, integration, faults
	@# While pip fetches, mypy computes.
	@$(MAKE) --no-print-directory -j lint vllm-env clients-env
	@$(MAKE) --no-print-directory -j --output-sync=target test-unit test-registry
	@$(BIN)/pytest tests/integration tests/conformance tests/faults --ignore=tests/integration/test_registry.py

# Unit tests keep two cores busy when a file of them runs on each; the others have stacks of processes of their own, but
# for the registry's: those wait for leases, and use no CPU to speak of.
test-unit: venv
	@OMP_NUM_THREADS=1 $(BIN)/pytest tests/unit -n 2 --dist loadfile

test-registry: venv
	@$(BIN)/pytest tests/integration/test_registry.py

test-clients: venv clients-env aiperf-env ## every client that we know, aiperf too, against a Baton of its own, or URL=http://127.0.0.1:8000
	@BATON_TEST_URL=$(URL) $(BIN)/pytest tests/integration/clients -q -rP

api-cases: venv deps ## 5,000 requests drawn from our OpenAPI description (CASES=5000)
	@BATON_API_CASES=$(or $(CASES),5000) $(BIN)/pytest tests/integration/test_openapi.py -q -s

faults: venv deps ## break a running Baton, by seed, and count what clients saw (ARGS="--seed 7 --faults 500 --parts processes")
	@$(BIN)/python -m tests.faults.suite $(ARGS)

clean: down ## remove what was built (not the fetched model)
	@rm -rf $(VENV) .venv-vllm $(CLIENTS) $(AIPERF) build dist *.egg-info baton/v1 .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
