# make train    train with defaults in an environment of its own
# make test     the tests, without the slow ones
# make test-slow, lint, format, gpu-check, clean
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement

.PHONY: train test test-slow lint format gpu-check clean

.venv: $(VENV)/run.stamp

$(VENV)/run.stamp: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "this project needs Python 3.10 or newer: make PYTHON=python3.12 …")'
	test -x $(RUN) || $(PYTHON) -m venv $(VENV)
	$(INSTALL) requirements.txt
	touch $@

$(VENV)/dev.stamp: $(VENV)/run.stamp requirements-dev.txt
	$(INSTALL) requirements-dev.txt
	touch $@

train: $(VENV)/run.stamp
	$(RUN) train.py

test: $(VENV)/dev.stamp
	$(RUN) -m pytest

test-slow: $(VENV)/dev.stamp
	$(RUN) -m pytest -m slow

lint: $(VENV)/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: $(VENV)/dev.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

# On any CUDA machine, with the python3 it has.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV)
