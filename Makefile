# On a fresh machine: `make train` trains the quickstart, `make test` runs every test.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Not benchmarks, or not for every machine: aot.py and pipeline_aot.py need jax[tpu].
NOT_RUN = %/results.py %/tpu_cost.py %/aot.py %/pipeline_aot.py
STDLIB  = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")

.PHONY: train test lint bench wheel clean

train: $(VENV)/.run data/quickstart
	$(BIN)/python -m jaxforge.train --config configs/quickstart.toml
	$(BIN)/python -m jaxforge.generate runs/quickstart --prompt "def " \
	  --temperature 0.8 --top-p 0.95 --max-tokens 200

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.dev
	for script in $(filter-out $(NOT_RUN),$(wildcard benchmarks/*.py)); do \
	  $(BIN)/python $$script || exit 1; done

wheel: $(VENV)/.dev
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) dist build

# Real text that every machine has: the source of Python's standard library.
data/quickstart: | $(VENV)/.run
	$(BIN)/python -m jaxforge.prepare $(STDLIB) --output $@ --glob '*.py' \
	  --exclude 'site-packages/*' --exclude 'test/*' --exclude '*/test/*' --exclude '*/tests/*' \
	  --exclude 'idlelib/*' --exclude 'lib2to3/*' --exclude 'encodings/*' --exclude 'pydoc_data/*' \
	  --tokenizer bpe --vocab-size 4096 --validation-fraction 0.05

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[dev,torch]"
	touch $@ $(VENV)/.run
