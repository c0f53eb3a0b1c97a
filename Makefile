# Each target works by itself from an empty clone, given Python 3.11 or newer as `python3`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -qq --disable-pip-version-check --constraint constraints.txt
STAMP = $(VENV)/.installed-$(1)
SOURCES := pyproject.toml constraints.txt

.DEFAULT_GOAL := help
.PHONY: help run test test-long lint bench protos docs clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; give one with PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "make: $$($(PYTHON) --version) is too old; give Python 3.11 or newer with PYTHON=..." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(call STAMP,run): $(BIN)/python $(SOURCES)
	@echo "installing bertserve (some minutes the first time) ..."
	@$(PIP) --editable '.[cpu,export,demo]'
	@touch $@

$(call STAMP,dev): $(call STAMP,run)
	@echo "installing the test tools ..."
	@$(PIP) --editable '.[cpu,openvino,export,demo,loadtest,dev]'
	@touch $@

models/minilm: $(call STAMP,run)
	@$(BIN)/bertserve export demo --out models

run: models/minilm ## export the demo model once, then serve it
	@exec $(BIN)/bertserve serve --models models

test: $(call STAMP,dev) ## the tests of every change, in minutes
	@$(BIN)/python -m pytest -m "not long"

test-long: $(call STAMP,dev) ## every test at full size
	@$(BIN)/python -m pytest

lint: $(call STAMP,dev) ## style, types and generated files
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy

bench: $(call STAMP,dev) models/minilm ## latency and throughput beside the raw engine
	@$(BIN)/python -m loadtest.bench --models models

protos: $(call STAMP,dev) ## the Python files of the protocol definitions
	@$(BIN)/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. serving/transport/grpc/inference.proto

docs: $(call STAMP,dev) ## the generated pages
	@$(BIN)/python -m serving.settings_page docs/settings.md

clean: ## everything that was made here
	rm -rf $(VENV) build dist models *.egg-info
