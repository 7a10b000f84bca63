# `make train` and `make test` are the two commands to know. Each target builds
# .venv on first use and again when the pinned requirements change.

# Python 3.10 or 3.11; name one with `make PYTHON=/path/to/python3.10 ...`.
PYTHON ?=
VENV ?= .venv
TRAIN_FLAGS ?= --dataset=digits --num_clients=500 --mechanism=adaptive \
  --target_epsilon=2 --target_delta=1e-3 --clients_per_round=100 --rounds=60 \
  --output_dir=runs/digits --overwrite
BENCHMARK_FLAGS ?=
PYTEST_ARGS ?=
# `make requirements UPGRADE=--upgrade` takes newer versions where it may.
UPGRADE ?=
UV_VERSION = 0.13.8

BIN = $(VENV)/bin
STAMP = $(VENV)/.installed
RUN = TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/python

# A name on PATH may be a shim that fails, so a Python counts if it runs, is of
# a supported version and can make a virtual environment.
SUITABLE = import ensurepip, sys; sys.exit(sys.version_info[:2] not in ((3, 10), (3, 11)))
CANDIDATES = $(or $(PYTHON),python3.11 python3.10 python3)
FOUND = $(shell for python in $(CANDIDATES); do \
  if "$$python" -c '$(SUITABLE)' >/dev/null 2>&1; then echo "$$python"; break; fi; done)
require_python = $(if $(FOUND),,$(error tfdp_fl needs Python 3.10 or 3.11 with \
its venv module, and none answers to: $(CANDIDATES); install one of them, or \
name it, as in: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11))

.PHONY: help train test lint format benchmark notebooks build-files \
  requirements install clean distclean

help:
	@echo "make train         train on digits, epsilon = 2; results in runs/digits"
	@echo "make test          run every test"
	@echo "make lint          check style and format"
	@echo "make format        mend style and format where that is automatic"
	@echo "make benchmark     time the engine side by side with TFF"
	@echo "make notebooks     run the notebooks in colab/ and keep their output"
	@echo "make build-files   write the BUILD files from the imports"
	@echo "make requirements  pin requirements*.txt anew from requirements/"
	@echo "make clean         remove caches and build products"
	@echo "make distclean     remove those, .venv and runs"

train: $(STAMP)
	$(BIN)/python scripts/train.py $(TRAIN_FLAGS)

test: $(STAMP)
	$(RUN) -m pytest $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

benchmark: $(STAMP)
	$(RUN) research/benchmark.py $(BENCHMARK_FLAGS)

notebooks: $(STAMP)
	TF_CPP_MIN_LOG_LEVEL=2 $(BIN)/jupyter execute --inplace colab/*.ipynb

build-files: $(STAMP)
	$(BIN)/python tools/update_build_files.py --write

install: $(STAMP)

# A .venv of a suitable Python is brought up to date, any other is made anew.
$(STAMP): requirements-full.txt setup.py
	$(require_python)
	@$(BIN)/python -c '$(SUITABLE)' 2>/dev/null || "$(FOUND)" -m venv --clear $(VENV)
	@echo "Installing the pinned requirements into $(VENV) (2.6 GB, a minute or two) ..."
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --use-pep517 --require-hashes --no-deps -r requirements-full.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	  --no-deps --no-build-isolation --editable .
	@touch $@

# Resolved once for 3.10 and 3.11, with the overrides that pip does not have.
# The condition that holds everywhere here is dropped from each line.
UV_VENV = .venv-uv
COMPILE = $(UV_VENV)/bin/uv pip compile --quiet --universal \
  --python-version 3.10 --generate-hashes --no-header \
  --override requirements/overrides.txt $(UPGRADE)
EVERYWHERE = platform_machine == 'x86_64' and sys_platform == 'linux'
define pin
	$(COMPILE) --output-file $(1) $(2) >/dev/null
	sed -i -e "s/ ; python_full_version < '3.12' and $(EVERYWHERE)//" \
	  -e "s/ and $(EVERYWHERE)//g" \
	  -e '1i # Pinned from requirements/ by: make requirements' \
	  -e '1i # Install with: pip install --no-deps --require-hashes -r $(1)' $(1)
endef

requirements: $(UV_VENV)/.installed-$(UV_VERSION)
	$(call pin,requirements-full.txt,requirements/full.in requirements/test.in)
	$(call pin,requirements.txt,requirements/base.in --constraint requirements-full.txt)

$(UV_VENV)/.installed-$(UV_VERSION):
	$(require_python)
	@"$(FOUND)" -m venv $(UV_VENV)
	@$(UV_VENV)/bin/python -m pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -path './.venv*' -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +

distclean: clean
	rm -rf .venv .venv-uv runs
