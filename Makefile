# Everything runs in .venv, which the first target to need it makes. Override the interpreter: make PYTHON=python3.12 test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# where this venv's packages are up to date with pyproject.toml
STAMP := $(VENV)/.installed

# the laws of the numba.cuda kernels in the simulator, which is on or off for a whole process; without those of the
# engine and the model, whose rounds it is too slow for
OPS := accept_tree,build_tree,choose_tokens,compact_cache,topk_log_probs,tree_positions,verify_attention,visibility_words
SIMULATOR = NUMBA_ENABLE_CUDASIM=1 DDTREE_PROFILE=simulator OPENBLAS_NUM_THREADS=1 \
  $(BIN)/python -m pytest -n auto -m "not large" --ddtree-backend numba_cuda --ddtree-ops $(OPS) --ddtree-at-least 2000

.PHONY: demo test docs mutants coverage fuzz lint bench clean

demo: $(STAMP)
	$(BIN)/ddtree demo

# one BLAS thread a process: the test processes keep the cores busy already
test: $(STAMP)
	OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --ddtree-at-least 50000
	$(SIMULATOR)

# the site: pages, docstrings, and the figures that the pages' code draws. Any warning is an error.
DOCS := analysis/docs
docs: $(VENV)/.docs
	rm -rf $(DOCS)/api $(DOCS)/figures
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -d $(DOCS)/build/doctrees $(DOCS) $(DOCS)/build/html
	@echo "Open $(DOCS)/build/html/index.html"

# half an hour on two cores. A part of them: make mutants MUTANTS="--op accept_tree", see MUTANTS=--help
mutants: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[mutants]"
	$(BIN)/python -m ddtree.property_tests.project.mutants.run $(MUTANTS)

# what parses bytes, on many bytes that are not as they should be: make fuzz FUZZ_BYTES=100000000 SEED=1. Guided by
# coverage where atheris has a wheel for this Python, else at random.
FUZZ_BYTES ?= 10000000
SEED ?= 0
fuzz: $(STAMP)
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,fuzz]"
	$(BIN)/python -m ddtree.property_tests.project.fuzz --bytes $(FUZZ_BYTES) --seed $(SEED) \
	  $(if $(filter 10000000,$(FUZZ_BYTES)),--results property_tests/project/fuzz/RESULTS.md)

# the lines of ddtree/ and reference/ that the tests run; few examples, as a line that is run once is run
coverage: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,coverage]"
	$(BIN)/python -m coverage erase
	OPENBLAS_NUM_THREADS=1 COVERAGE_FILE=$(CURDIR)/.coverage $(BIN)/python -m coverage run \
	  --source=$(CURDIR)/ddtree,$(CURDIR)/reference -m pytest -n auto --ddtree-examples 50
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/ddtree bench

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "ddtree needs Python 3.11 or newer, and $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[test,lint]"
	@touch $@

$(VENV)/.docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@

clean:
	rm -rf $(VENV) $(DOCS)/build $(DOCS)/api $(DOCS)/figures .coverage* build dist *.egg-info demo_output ddtree_failures fuzz_crashes .mutants
