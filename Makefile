# constraints.txt pins the versions that CI tests, torch included (on Linux, pip installs its CUDA
# build). For the newest versions: make clean && make demo CONSTRAINTS=/dev/null
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt

BIN := .venv/bin
DEMO_STAMP := .venv/.installed-for-demo
STAMP := .venv/.installed
TEST_STAMP := .venv/.installed-for-tests
TYPECHECK := .cache/typecheck/graphshard
TESTS := test-two-at-a-time test-zoo test-alone

.PHONY: demo test $(TESTS) coverage lint docs clean

demo: $(DEMO_STAMP)
	$(BIN)/python -m graphshard demo

# One thread per rank, since the ranks of a test share the cores. Inductor's cache is kept between
# runs: compiling the same kernels again would take most of the time.
$(TESTS) coverage: export OMP_NUM_THREADS ?= 1
$(TESTS) coverage: export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
# Huge pages: tests that use much memory otherwise spend half of their time on page faults.
$(TESTS) coverage: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Tests run two at a time, except those that measure time or memory, kill ranks, or share a GPU.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/zoo -m "not alone and not gpu"
ALONE := -m "alone or gpu"
# Run all stages, even if one fails; the last line names the failed ones.
test:
	@failed=; \
	for stage in lint docs $(TESTS); do $(MAKE) $$stage || failed="$$failed $$stage"; done; \
	test -z "$$failed" || { echo "Failed:$$failed" >&2; exit 1; }

test-two-at-a-time: $(TEST_STAMP)
	$(BIN)/pytest $(TWO_AT_A_TIME)

test-zoo: $(TEST_STAMP)
	$(BIN)/pytest -n 2 tests/zoo

test-alone: $(TEST_STAMP)
	$(BIN)/pytest $(ALONE)

# Run the tests and list the lines of graphshard that none of them ran. Takes 50 % longer than the
# tests alone. Skips the zoo, which covers no additional lines.
coverage: $(TEST_STAMP)
	rm -rf .cache/coverage
	mkdir -p .cache/coverage
	$(BIN)/coverage run -m pytest $(TWO_AT_A_TIME)
	$(BIN)/coverage run -m pytest $(ALONE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing

# mypy checks a tree of symbolic links; [tool.mypy] in pyproject.toml explains why.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPECHECK)
	mkdir -p $(TYPECHECK)
	ln -s $(CURDIR)/graphshard/* $(CURDIR)/passes $(TYPECHECK)
	$(BIN)/mypy

# Build the site, .cache/site/index.html; warnings are errors. -E reads all pages again, because
# Sphinx does not notice changed docstrings.
docs: $(TEST_STAMP)
	$(BIN)/sphinx-build -E -W --keep-going -q docs .cache/site

# -c instead of PIP_CONSTRAINT, which would also pin the isolated build environment.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[demo]"
	touch $@

# Dev tools, which the demo does not need: it should start quickly.
$(STAMP): $(DEMO_STAMP)
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[docs]"
	touch $@

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
