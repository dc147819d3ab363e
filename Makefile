# On a fresh machine: `make train` trains the quickstart, `make test` runs every test.

# The newest supported Python that can make an environment; a version that only has a name cannot.
RUNS    = command -v $(1) >/dev/null && $(1) -c 'import ensurepip' 2>/dev/null
PYTHON ?= $(shell for python in python3.13 python3.12 python3.11; do \
            if $(call RUNS,$$python); then echo $$python; exit; fi; done; echo python3)
VENV   ?= .venv
BIN    := $(VENV)/bin
# A torch without CUDA is on PyPI for no Python; where constraints.txt pins one, its tests run.
EXTRAS  = $(shell $(BIN)/python -c "import sys; print('dev' + ',torch' * (sys.version_info < (3, 12)))")
STDLIB  = $(shell $(BIN)/python -c "import sysconfig; print(sysconfig.get_path('stdlib'))")

# No notices about newer versions of pip, or about root in containers.
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PIP_ROOT_USER_ACTION := ignore

.PHONY: train speedrun test test-changed test-all test-lines test-gpu-compiler test-torchtitan test-megatron test-lm-eval lint bench docs wheel clean

train: $(VENV)/.run data/quickstart
	@echo 'Training 300 updates: about seven minutes on two idle CPU cores. Ctrl-C saves, make train goes on.'
	$(BIN)/jaxforge train --config configs/quickstart.toml
	$(BIN)/jaxforge generate runs/quickstart --prompt "def" \
	  --temperature 0.8 --top-p 0.95 --max-tokens 200
	@printf '\nNext, after `source $(BIN)/activate` or as it stands:\n'
	@printf '  $(BIN)/jaxforge %s\n' 'report runs/quickstart        # its curves, as a page' \
	  'generate runs/quickstart --prompt "class"' \
	  'prepare my_texts/ --output data/mine --tokenizer bpe   # your own text: it says how to go on'

speedrun: $(VENV)/.run data/quickstart
	$(BIN)/jaxforge train --config configs/speedrun/cpu.toml

test: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The tests that a change can reach: test files that import a file which differs from BASE.
BASE ?= main
test-changed: $(VENV)/.dev
	$(BIN)/python -m pytest -m "not slow" -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --changed-since $(BASE)

# The slow tests as well.
test-all: $(VENV)/.dev
	$(BIN)/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder

# The suite on every line of JAX that constraints.txt pins, and on the one between: before a change of
# pyproject.toml or constraints.txt, with as many of the Pythons as there are.
test-lines:
	for python in python3.11 python3.12 python3.13; do if $(call RUNS,$$python); then \
	  $(MAKE) test PYTHON=$$python VENV=$(VENV)-lines/$$python || exit 1; else \
	  echo "no $$python: not tested"; fi; done
	if $(call RUNS,python3.12); then python=$(VENV)-lines/python3.12/bin/python; \
	  $$python -m pip install --quiet jax==0.11.2 jaxlib==0.11.2 && \
	  $$python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder; \
	  rm $(VENV)-lines/python3.12/.dev; fi

# Compiles steps for GPU meshes without a GPU: 4 GB of compilers, in an environment of their own.
test-gpu-compiler: $(VENV)-cuda/.done
	$(VENV)-cuda/bin/python -m pytest tests/parallel/test_gpu_meshes.py tests/tools/plan

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python .ci/english.py

# Every benchmark that needs no accelerator and says nothing else in its docstring. All run; one below a floor fails.
BENCHMARKS = $(shell grep -l '^if __name__' benchmarks/*.py | xargs grep -L 'Not in `make bench`')
bench: $(VENV)/.dev
	failed=; for script in $(BENCHMARKS); do $(BIN)/python $$script || failed="$$failed $$script"; done; \
	  test -z "$$failed" || { echo "failed:$$failed"; exit 1; }

# torchtitan's own code for tests/torch_compat/test_torchtitan.py: three of its versions side by side,
# without the packages that only training needs.
TITAN_NEEDS = torchdata==0.11.0 tyro==1.0.17 docstring_parser==0.18.0 typeguard==4.6.0 \
  tomli==2.5.0 spmd_types==0.2.3
test-torchtitan: $(VENV)/.dev
	for version in 0.1.0 0.2.2 0.3.0; do \
	  $(BIN)/python -m pip install --quiet --no-deps --target build/torchtitan/$$version \
	    torchtitan==$$version $(TITAN_NEEDS) || exit 1; done
	$(BIN)/python -m pytest tests/torch_compat/test_torchtitan.py

# Megatron-Core's own code for tests/torch_compat/test_megatron_jobs.py, without its packages for GPUs.
test-megatron: $(VENV)/.dev
	$(BIN)/python -m pip install --quiet --no-deps --target build/megatron/0.16.1 megatron-core==0.16.1
	$(BIN)/python -m pytest tests/torch_compat/test_megatron_jobs.py

# EleutherAI's lm_eval, with its own backend to compare with, in an environment of its own.
test-lm-eval: $(VENV)-lm-eval/.done
	$(VENV)-lm-eval/bin/python -m pytest tests/harness
	$(VENV)-lm-eval/bin/python benchmarks/harness.py --quick

# The documentation as a site: build/docs/index.html.
docs: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -q -b html -d build/doctrees -c docs . build/docs

# Check that the documentation builds without a warning: 50 seconds of a core, no pages.
.PHONY: docs-check
docs-check: $(VENV)/.docs
	$(BIN)/sphinx-build -W --keep-going -q -b dummy -D autodoc_typehints=none -d build/doctrees -c docs . build/docs-check

wheel: $(VENV)/.dev
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) $(VENV)-cuda $(VENV)-lines $(VENV)-lm-eval dist build

# Real text that every machine has: the source of Python's standard library. The summary of `prepare`
# ends with its own next command, while `make train` goes on by itself.
data/quickstart: | $(VENV)/.run
	summary=$$($(BIN)/jaxforge prepare $(STDLIB) --output $@ --glob '*.py' \
	  --exclude 'site-packages/*' --exclude 'test/*' --exclude '*/test/*' --exclude '*/tests/*' \
	  --exclude 'idlelib/*' --exclude 'lib2to3/*' --exclude 'encodings/*' --exclude 'pydoc_data/*' \
	  --tokenizer bpe --vocab-size 4096 --validation-fraction 0.05) && \
	  printf '%s\n' "$$summary" | sed '/train\.toml: /,$$d'

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# pip says nothing while it works (--quiet): `make` says what it waits for.
INSTALLING = @echo 'Installing $(1) into $(2), from the package index: about a minute, more on a slow line.'

$(VENV)/.run: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALLING,JAX and jaxforge,$(VENV))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALLING,jaxforge and what its tests need,$(VENV))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[$(EXTRAS)]"
	touch $@ $(VENV)/.run

$(VENV)/.docs: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALLING,jaxforge and Sphinx,$(VENV))
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@ $(VENV)/.run

# All of `.ci/run` in one installation. Compiling all 20,000 installed files takes 50 seconds of one
# core. Python compiles the imported quarter itself, on both cores, and keeps the result.
$(VENV)/.ci: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(call INSTALLING,jaxforge and what its checks need,$(VENV))
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt \
	  --editable ".[$(EXTRAS),docs]"
	touch $@ $(VENV)/.run $(VENV)/.dev $(VENV)/.docs

$(VENV)-cuda/.done: pyproject.toml constraints.txt
	$(call INSTALLING,the compilers for GPUs (4 GB),$(VENV)-cuda)
	$(PYTHON) -m venv $(VENV)-cuda
	$(VENV)-cuda/bin/python -m pip install --quiet --constraint constraints.txt --editable ".[cuda]" pytest
	touch $@

$(VENV)-lm-eval/.done: pyproject.toml constraints.txt
	$(call INSTALLING,lm_eval and torch,$(VENV)-lm-eval)
	python3.11 -m venv $(VENV)-lm-eval
	$(VENV)-lm-eval/bin/python -m pip install --quiet --constraint constraints.txt \
	  --editable ".[lm-eval,torch]" "lm_eval[hf]" pytest
	touch $@
