# make train        trains with the defaults, in an environment of its own (.venv)
# make test         the tests, without the slow ones; make test-slow runs those
# make bench        our bf16 kernel against the libraries
# make lesson       the lesson as an HTML page
# make lint         ruff, ruff format, clang-format, pyright; actionlint where it is installed
# make format       ruff's fixes, ruff format, clang-format
# make cuda-check   compiles the CUDA extension with nvcc; needs no GPU
# make gpu-check    tests, benchmarks and a short run on a CUDA machine
# make clean        removes the environments
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
INSTALL := $(RUN) -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --requirement

CUDA_VENV := .venv-cuda
CXX_FILES = $(wildcard csrc/*.cu csrc/*.cuh csrc/*.cpp csrc/*.h csrc/cuda_on_cpu/*.cpp csrc/cuda_on_cpu/*.h)

.PHONY: train test test-slow bench lesson lint format cuda-check gpu-check clean

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
	$(RUN) -m pytest -n 2

test-slow: $(VENV)/dev.stamp
	$(RUN) -m pytest -m slow

bench: $(VENV)/run.stamp
	$(RUN) benchmark.py

lesson: $(VENV)/dev.stamp
	$(RUN) -m nbconvert --to html lessons/mixed_precision.ipynb

lint: $(VENV)/dev.stamp
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)
	$(RUN) -m pyright
	@if command -v actionlint; then actionlint; else echo "no actionlint here: .github/ is not checked"; fi

format: $(VENV)/dev.stamp
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

$(CUDA_VENV)/run.stamp: requirements.txt
	test -x $(CUDA_VENV)/bin/python || $(PYTHON) -m venv $(CUDA_VENV)
	$(CUDA_VENV)/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.txt 'torch>=2.14'
	touch $@

# Compiles the CUDA extension with nvcc, against a CUDA build of PyTorch in an environment of its own.
cuda-check: $(CUDA_VENV)/run.stamp
	$(CUDA_VENV)/bin/python -m pytest -m cuda_build tests/test_cuda_build.py

# With the python3 that the machine has.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check

clean:
	rm -rf $(VENV) $(CUDA_VENV)
