# `make run` and `make test` need only python3 and make: they create .venv on first use and reuse it after.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: run test test-slow check format docs gallery results clean

run: $(VENV)/.run
	$(BIN)/interlayer compare

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 2 --dist loadfile

test-slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.docs
	$(BIN)/python docs/build_site.py

gallery: $(VENV)/.dev
	$(BIN)/python docs/draw_gallery.py

results: $(VENV)/.dev
	$(BIN)/python docs/write_results.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Exact versions come from constraints.txt, so an install next year is today's install.
$(VENV)/.run: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@ $(VENV)/.run

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@ $(VENV)/.run

clean:
	rm -rf $(VENV) build dist src/*.egg-info .pytest_cache .ruff_cache .mypy_cache runs
