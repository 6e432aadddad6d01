# Everything runs from a virtual environment that the first target makes: `make demo`, `make test`.
# Where torch, triton and cuda-bindings are installed already and no registry is reachable:
#     python3 -m pip install --no-deps --no-build-isolation -e .
#     make test VENV= PYTHON=python3

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
BENCH_ARGS ?= ops
SOAK_ARGS ?=
SANITIZER_ARGS ?=
FUZZ ?= 1000
# torch's CUDA build brings the triton it was built with; its CPU build brings none.
TRITON_FOR_CPU := triton==3.6.0

ifeq ($(strip $(VENV)),)
PY := $(PYTHON)
STAMP :=
else
PY := $(VENV)/bin/python
STAMP := $(VENV)/.weft-installed
endif
PIP := $(PY) -m pip install --disable-pip-version-check --quiet --constraint constraints.txt

export OMP_NUM_THREADS ?= 1

.PHONY: help setup demo test tiny programs frameworks bench forms model mutants soak fuzz fuzz-pass sanitize lint format format-check typecheck docs clean

help:
	@echo "make demo (minutes without GPUs) | tiny (1 minute) | test (20 minutes on 2 cores)"
	@echo "make bench | lint | format | format-check | typecheck | docs | clean"
	@echo "long: make programs | frameworks | forms | model | mutants | soak | fuzz | fuzz-pass | sanitize"

setup: $(STAMP)

$(VENV)/.weft-installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(None if (3, 10) <= v < (3, 14) else \
		"weft needs Python 3.10 to 3.13; PYTHON=$(PYTHON) is %d.%d" % v[:2])'
	@test -x $(PY) || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); }
	@echo "installing torch into $(VENV) (minutes, the first time)"
	@$(PIP) torch
	@$(PY) -c 'import importlib.util as u, sys; sys.exit(u.find_spec("triton") is None)' || $(PIP) $(TRITON_FOR_CPU)
	@echo "installing weft and its tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

demo: $(STAMP)
	@echo "a model is compiled twice: minutes without GPUs"
	$(PY) examples/llama_block.py

# WORKERS processes run tests side by side, by default one more than there are processors, as ranks often wait
# (tests/conftest.py). Tests marked `alone` or `gpu` run after them, one by one.
# Bytecode is kept, or each of these processes compiles every file anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(PY) -m pytest
WORKERS ?= auto

test: $(STAMP)
ifeq ($(strip $(PYTEST_ARGS)),)
	@echo "the whole suite: about 20 minutes on 2 cores; make tiny takes one"
	@failed=0; \
	$(PYTEST) -m "not (alone or gpu or slow)" -n $(WORKERS) --dist worksteal || failed=1; \
	$(PYTEST) -m "(alone or gpu) and not slow" || failed=1; \
	exit $$failed
else
	$(PYTEST) $(PYTEST_ARGS)
endif

# Everything once, small, in about a minute.
tiny: $(STAMP)
	$(PYTEST) tests/test_tiny.py

# Whole programs with the code that Inductor writes, what the pass adds to that, and each kernel for all that it is
# compiled for: minutes.
programs: $(STAMP)
	$(PY) -m pytest -m "slow or not slow" tests/fused_ops/passes/programs tests/fused_ops/passes/test_cost.py \
		tests/fused_ops/passes/agreement/test_ranks_that_differ.py tests/examples/test_llama_block.py \
		tests/kernels/test_cuda_compile.py tests/kernels/test_gemm_compile.py \
		tests/kernels/test_scaled_gemm_compile.py tests/kernels/test_tensor_memory.py tests/fused_ops/passes/test_ranks_compiled.py \
		tests/fused_ops/passes/graph/test_called_graphs.py tests/fused_ops/passes/agreement/test_unasked.py \
		tests/fused_ops/process_groups/test_like_gloo.py $(PYTEST_ARGS)

# Those of the frameworks that are installed: minutes.
frameworks: $(STAMP)
	$(PY) -m pytest -m "slow or not slow" tests/frameworks $(PYTEST_ARGS)

# 3,000 random programs, each with and without the pass, and 1,000 in other orders.
fuzz-pass: $(STAMP)
	$(PY) -m pytest -m slow -s tests/fused_ops/passes/test_random_programs.py \
		tests/fused_ops/passes/order/test_reorder.py tests/fused_ops/passes/order/test_gathered_layers.py \
		$(PYTEST_ARGS)

bench: $(STAMP)
	$(PY) bench/run.py $(BENCH_ARGS)

# Needs SPIN (apt install spin) and a C compiler: some minutes.
model: $(STAMP)
	$(PY) tests/verification/model/check.py

# Mistakes on purpose, each of which a test has to see: in kernels on the CPU, and sixty in a copy of the tree.
mutants: $(STAMP)
	$(PY) -m pytest -m slow tests/verification
	$(PY) tests/mutants.py

# 100,000 calls, on GPUs where there are enough: SOAK_ARGS="--ranks 4".
soak: $(STAMP)
	$(PY) tests/soak/soak.py $(SOAK_ARGS)

# FUZZ cases of each test; `make test` takes 60.
fuzz: $(STAMP)
	WEFT_FUZZ=$(FUZZ) $(PY) -m pytest tests/fuzz --timeout 3600

# Needs GPUs and compute-sanitizer, which comes with the CUDA toolkit.
sanitize: $(STAMP)
	$(PY) tests/sanitizer/sanitize.py $(SANITIZER_ARGS)

# The table of forms, from weft's pass and torch's own on the same graphs.
forms: $(STAMP)
	$(PY) bench/run.py forms

lint: $(STAMP)
	$(PY) -m ruff check .

format: $(STAMP)
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

format-check: $(STAMP)
	$(PY) -m ruff format --check .

# mypy follows `weft.*` through a link named like the package, whatever the checkout's folder is called.
typecheck: $(STAMP)
	@mkdir -p build/typing && ln -sfn ../.. build/typing/weft
	$(PY) -m mypy -p weft.symm_mem -p weft.kernels -p weft.fused_ops
	$(PY) -m mypy bench examples

# build/docs/index.html: the pages of docs/, and the API from the docstrings. A warning is an error.
docs: $(STAMP)
	$(PY) -m sphinx --fail-on-warning --keep-going --quiet --fresh-env docs build/docs

clean:
	rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache
