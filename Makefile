PYTHON ?= python3
VENV ?= .venv

BIN := $(VENV)/bin
GGUF := models/SmolLM2-135M-Instruct.Q4_1.gguf
BUNDLE := models/SmolLM2-135M-Instruct.edge
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e

.PHONY: help demo test lint types links build coverage model clean
.DEFAULT_GOAL := help

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.export model ## Export the demo model to an int4 bundle and ask it a question
	$(BIN)/edgekit export $(GGUF) $(BUNDLE) --precision int4 --force
	$(BIN)/edgekit chat $(BUNDLE) --prompt "Name the capital of France."

test: $(VENV)/.dev model ## Run all tests
	$(BIN)/pytest

lint: links ## Check style, formatting, the oldest Python and who imports whom
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/vermin --target=3.10- --violations --no-tips edgekit export runtime devices examples optimum tests tools
	cd build/links && $(abspath $(BIN))/lint-imports --no-logo

types: links ## Check types
	$(BIN)/mypy

links: $(VENV)/.dev ## Lay out the installed shape of the package in build/links, for lint and types
	$(BIN)/python tools/link_tree.py

build: $(VENV)/.dev ## Build the sdist, and the wheel from it, into dist/
	$(BIN)/python -m build

coverage: $(VENV)/.dev model ## Run all tests and show the lines that none of them ran
	$(BIN)/coverage run -m pytest
	$(BIN)/coverage report

model: $(VENV)/.venv ## Download the demo model into models/ (98 MB, once)
	$(BIN)/python tools/get_demo_model.py

clean: ## Remove all that make made, except the demo model
	rm -rf $(VENV) build dist edgekit.egg-info .coverage .mypy_cache .pytest_cache .ruff_cache $(BUNDLE)

# Each stamp says what the environment holds; it is made again when the lists of packages change.
$(VENV)/.venv:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.export: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) '.[export]'
	touch $@

$(VENV)/.dev: $(VENV)/.venv pyproject.toml constraints.txt
	$(INSTALL) '.[export,dev]'
	touch $(VENV)/.export $@
