# `make train` and `make test` are the two commands to know. Each target builds
# a virtual environment on first use, and again when its pins change.

# Two stacks: "current" (the newest TensorFlow with Keras 3, on Python 3.10 to 3.13;
# what needs TFF is skipped) and "tff" (TensorFlow 2.14 with TFF 0.87, on Python
# 3.10 or 3.11). `make test` runs both; for the rest choose as in:
#   make STACK=tff train
STACK ?= current
# Name a Python as in: make PYTHON=/path/to/python3.10 test
PYTHON ?=
TRAIN_FLAGS ?= --dataset=digits --num_clients=500 --mechanism=adaptive \
  --target_epsilon=2 --target_delta=2e-4 --clients_per_round=100 --rounds=60 \
  --output_dir=runs/digits --overwrite
BENCHMARK_FLAGS ?=
PYTEST_ARGS ?=
# One piece of `make stress`, a file or a test; all of it in two processes if empty.
STRESS ?=
# `make requirements UPGRADE=--upgrade` takes newer versions where it may.
UPGRADE ?=
UV_VERSION = 0.13.8
MYPY_VERSION = 2.4.1
MYPY_VENV = .venv-mypy
DOCS_VENV = .venv-docs

PYTHONS_tff = (3, 10), (3, 11)
PYTHONS_current = (3, 10), (3, 11), (3, 12), (3, 13)
NAMES_tff = python3.11 python3.10 python3
# pyenv's shims answer for the chosen version only; its others lie beside.
PYENV = $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions
NAMES_current = python3.13 $(wildcard $(PYENV)/3.13.*/bin/python) \
  python3.12 $(wildcard $(PYENV)/3.12.*/bin/python) python3.11 python3.10 python3

# A name on PATH may be a shim that fails, so a Python counts if it runs, is of
# a supported version and can make a virtual environment.
suitable = import ensurepip, sys; sys.exit(sys.version_info[:2] not in ($(PYTHONS_$(1))))
find = $(shell for python in $(or $(PYTHON),$(NAMES_$(1))); do \
  if "$$python" -c '$(call suitable,$(1))' >/dev/null 2>&1; then echo "$$python"; break; fi; done)
ifeq ($(filter $(STACK),tff current),)
  $(error STACK must be tff or current, got $(STACK))
endif
FOUND := $(call find,$(STACK))
WANTED_tff = Python 3.10 or 3.11 for the stack of TFF
WANTED_current = Python 3.10, 3.11, 3.12 or 3.13
require_python = $(if $(FOUND),,$(error tfdp_fl needs $(WANTED_$(STACK)) with \
its venv module, and none answers to: $(or $(PYTHON),$(NAMES_$(STACK))); install \
one of them, or name it, as in: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11))

VENV_tff = .venv
VENV_current = .venv-current
VENV ?= $(VENV_$(STACK))
PINNED_tff = requirements-full.txt
PINNED_current = requirements-current.txt
PINNED = $(PINNED_$(STACK))

# uv takes a sixth of pip's time. With --no-deps it does not ask which Pythons a
# package says it is for: TensorFlow Privacy 0.9.0 names those up to 3.11, and
# its queries run on later ones.
UV_VENV = .venv-uv
UV = $(UV_VENV)/bin/uv
UV_STAMP = $(UV_VENV)/.installed-$(UV_VERSION)
INSTALL = $(UV) pip install --quiet --no-deps --python

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
RUN = TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python

.PHONY: help python train test pytest mutants stress stress-crashes stress-others newcomer \
  lint types format benchmark notebooks docs docs-serve \
  requirements install clean distclean

help:
	@echo "The stack is $(STACK) (STACK=tff or STACK=current chooses)."
	@echo "make train         train on digits, epsilon = 2; results in runs/digits"
	@echo "make test          run every test, on both stacks"
	@echo "make pytest        run those that PYTEST_ARGS names, on one stack"
	@echo "make mutants       plant faults in a copy; the tests have to notice each"
	@echo "make stress        attack it for an hour (docs/threat_model.md)"
	@echo "make newcomer      play a first hour from the wheel on (minutes; downloads)"
	@echo "make lint          check style, format and types"
	@echo "make format        mend style and format where that is automatic"
	@echo "make benchmark     time the engine side by side with TFF"
	@echo "make notebooks     run the notebooks in colab/ and keep their output"
	@echo "make docs          build the documentation's site"
	@echo "make docs-serve    build it, and show it on a local port"
	@echo "make requirements  pin requirements*.txt anew from requirements/"
	@echo "make clean         remove caches and build products"
	@echo "make distclean     remove those, the virtual environments and runs"

# Which Python the stack would take; nothing where there is none.
python:
	@echo $(FOUND)

train: $(STAMP)
	$(BIN)/python scripts/train.py $(TRAIN_FLAGS)

test:
	tools/run_tests

# On one stack, as in: make pytest PYTEST_ARGS=tests/accounting
pytest: $(STAMP)
	$(RUN) -m pytest $(PYTEST_ARGS)

# Some of them, by a word in their names: make mutants MUTANTS="ledger flower"
mutants: $(STAMP)
	$(RUN) tools/mutants.py $(MUTANTS)

# One of them: make stress STRESS=tests/stress/kill_stress.py
STRESS_PYTEST = $(RUN) -m pytest -o python_files='*_stress.py' $(PYTEST_ARGS)
stress: $(STAMP)
ifeq ($(STRESS),)
	$(MAKE) --jobs=2 --keep-going stress-crashes stress-others
else
	$(STRESS_PYTEST) $(STRESS)
endif

CRASHES = $(addprefix tests/stress/,kill_stress.py crash_stress.py)
stress-crashes: $(STAMP)
	$(STRESS_PYTEST) $(CRASHES)

stress-others: $(STAMP)
	$(STRESS_PYTEST) tests/stress $(addprefix --ignore=,$(CRASHES))

# In an empty environment of Python 3.12, or of PYTHON; needs no other.
newcomer: PLAYER = $(firstword $(PYTHON) $(wildcard $(PYENV)/3.12.*/bin/python) python3.12)
newcomer:
	$(PLAYER) tools/first_hour.py

lint: $(STAMP) types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# A room of its own: TFF pins a typing-extensions that mypy is too new for.
types: $(STAMP) $(MYPY_VENV)/.installed-$(MYPY_VERSION)
	$(MYPY_VENV)/bin/mypy --python-executable $(BIN)/python \
	  tfdp_fl research scripts tools

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(STAMP)
	$(RUN) research/benchmark.py $(BENCHMARK_FLAGS)

# One of them needs keras-hub (requirements/keras-hub.in).
HUB = $(wildcard $(VENV)/lib/python*/site-packages/keras_hub)
notebooks: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/jupyter execute --inplace $(filter-out \
	  $(if $(HUB),,colab/language_model.ipynb),$(wildcard colab/*.ipynb))

# Strict: a link that leads nowhere is an error. NO_MKDOCS_2_WARNING: of the
# theme, about its successor.
docs: $(DOCS_VENV)/.installed
	@NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs build
	@echo "The site is in site/; make docs-serve shows it."

docs-serve: $(DOCS_VENV)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs serve

$(DOCS_VENV)/.installed: requirements-docs.txt | $(UV_STAMP)
	$(require_python)
	@"$(FOUND)" -m venv --clear $(DOCS_VENV)
	@$(INSTALL) $(DOCS_VENV) --require-hashes -r requirements-docs.txt
	@touch $@


install: $(STAMP)

# A virtual environment of a suitable Python is brought up to date, any other is
# made anew. Without compiled modules, and where PYTHONDONTWRITEBYTECODE is set, each
# process would compile TensorFlow anew, for 8 seconds; the tests start dozens.
$(STAMP): $(PINNED) setup.py | $(UV_STAMP)
	$(require_python)
	@$(BIN)/python -c '$(call suitable,$(STACK))' 2>/dev/null || "$(FOUND)" -m venv --clear $(VENV)
	@echo "Installing $(PINNED) into $(VENV) (2 to 3 GB, a minute or two) ..."
	@$(INSTALL) $(VENV) --compile-bytecode --require-hashes -r $(PINNED)
	@$(INSTALL) $(VENV) --no-build-isolation --editable .
	@touch $@

# Resolved once for all Pythons of a stack, with the overrides that pip does not
# have. The condition that holds everywhere there is dropped from each line.
COMPILE = $(UV) pip compile --quiet --universal \
  --python-version 3.10 --generate-hashes --no-header $(UPGRADE)
EVERYWHERE = platform_machine == 'x86_64' and sys_platform == 'linux'
# $(1): the pinned file; $(2): the first Python it is not for; $(3): arguments.
define pin
	$(COMPILE) --output-file $(1) $(3) >/dev/null
	sed -i -e "s/ ; python_full_version < '$(2)' and $(EVERYWHERE)//" \
	  -e "s/ and $(EVERYWHERE)//g" \
	  -e "s/ and python_full_version < '$(2)'//g" \
	  -e '1i # Pinned from requirements/ by: make requirements' \
	  -e '1i # Install with: pip install --no-deps --require-hashes -r $(1)' $(1)
endef

requirements: $(UV_STAMP)
	$(call pin,requirements-full.txt,3.12,requirements/full.in \
	  requirements/test.in --override requirements/overrides.txt)
	$(call pin,requirements-current.txt,3.14,requirements/current.in \
	  requirements/test-current.in --project requirements/current \
	  --override requirements/overrides-current.txt)
	$(call pin,requirements-docs.txt,3.14,requirements/docs.in \
	  --project requirements/current)

$(UV_STAMP):
	$(require_python)
	@"$(FOUND)" -m venv $(UV_VENV)
	@$(UV_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

$(MYPY_VENV)/.installed-$(MYPY_VERSION): | $(UV_STAMP)
	$(require_python)
	@"$(FOUND)" -m venv --clear $(MYPY_VENV)
	@$(UV) pip install --quiet --python $(MYPY_VENV) mypy==$(MYPY_VERSION)
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-* site runs
