# The constraints pin what CI tests, torch included (2.13.0: on Linux the default index has its CUDA
# build). For the newest of everything: make clean && make demo CONSTRAINTS=/dev/null
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

# The ranks of a test share the cores, so each gets one thread. Inductor's cache is kept between
# tests and runs: most of a test's time would otherwise go to compiling the same kernels again.
$(TESTS) coverage: export OMP_NUM_THREADS ?= 1
$(TESTS) coverage: export TORCHINDUCTOR_CACHE_DIR ?= $(CURDIR)/.cache/inductor
# Half of the time of what takes much memory goes to its pages: larger ones.
$(TESTS) coverage: export GLIBC_TUNABLES ?= glibc.malloc.hugetlb=1
# Two at a time, but for those that look at times, memory or the death of ranks, or share a GPU.
TWO_AT_A_TIME := -n 2 --dist loadfile --no-loadscope-reorder --ignore tests/zoo -m "not alone and not gpu"
ALONE := -m "alone or gpu"
# Every stage runs, even after one that failed: the last line names those that did.
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

# The same, and which lines of ours no test ran: counting takes half as long again. The zoo runs none
# that others do not.
coverage: $(TEST_STAMP)
	rm -rf .cache/coverage
	mkdir -p .cache/coverage
	$(BIN)/coverage run -m pytest $(TWO_AT_A_TIME)
	$(BIN)/coverage run -m pytest $(ALONE)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --show-missing

# mypy checks the links made here; [tool.mypy] in pyproject.toml says why.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	rm -rf $(TYPECHECK)
	mkdir -p $(TYPECHECK)
	ln -s $(CURDIR)/graphshard/* $(CURDIR)/passes $(TYPECHECK)
	$(BIN)/mypy

# The site is at .cache/site/index.html; every warning is an error. -E reads all pages again, since
# they show docstrings, of which Sphinx does not know that they changed.
docs: $(TEST_STAMP)
	$(BIN)/sphinx-build -E -W --keep-going -q docs .cache/site

# -c and not PIP_CONSTRAINT: that would also bind the isolated build, which needs no pins.
$(DEMO_STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[demo]"
	touch $@

# What the demo, which has to start soon, does not need.
$(STAMP): $(DEMO_STAMP)
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[dev]"
	touch $@

$(TEST_STAMP): $(STAMP)
	$(BIN)/pip install -c $(CONSTRAINTS) -e ".[bench,docs]"
	touch $@

clean:
	rm -rf .venv .cache build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
