# make setup | demo | test | lint: each does its own set-up first, once, into .venv.
PYTHON ?= python3.11
# Extra arguments for pip, e.g. the package index that holds the CPU builds of torch: make demo PIP_ARGS='--extra-index-url …'
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=

VENV := .venv
CONSTRAINTS := verl_bridge/config/constraints-cpu.txt
STAMP := $(VENV)/.setup-done
PIP := $(VENV)/bin/python -m pip

.PHONY: setup demo test lint clean
setup: $(STAMP)

# torch alone and first: with a CPU build in reach pip takes that one, and nothing later moves it.
$(STAMP): setup.py $(CONSTRAINTS)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo "Python 3.11 is needed and '$(PYTHON)' is not it: make setup PYTHON=/path/to/python3.11" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_ARGS) -c $(CONSTRAINTS) torch numpy setuptools
	@$(VENV)/bin/python -c 'import torch; torch.version.cuda and print("note: this torch build carries CUDA", torch.version.cuda, "libraries; PIP_ARGS can point pip at a CPU build")'
	$(PIP) install --quiet $(PIP_ARGS) -c $(CONSTRAINTS) --no-build-isolation -e '.[cpu,dev]'
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/verl-bridge demo $(DEMO_ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(TEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
