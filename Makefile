# make run: set up and run the main job. make check: lint, and tests that start no process. make test: those that start ranks as
# well. make test-all: programs and long chains, too; a change must pass them. make test-nightly: long combinations, before a
# release. make test ROOM=recovery: tests of one room of megatron_lossy (tests/rooms.py).
PYTHON ?= python3
BIN := .venv/bin
RUN_DIR ?= runs/tiny
# Several ranks on few cores crawl if each of them starts as many threads as there are cores.
export OMP_NUM_THREADS := 1
# Each rank imports the file of its test: without bytecode on disk it compiles it, too.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run run-wan run-churn check test test-long test-all test-nightly test-slurm lint bench mutants docs site report compat compat-ci

run: .venv/installed
	for rate in 0.00 0.10 0.20 0.40; do \
		$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 -m megatron_lossy.train \
			--config configs/tiny/llama_1m.yaml --p-grad $$rate --p-param $$rate \
			--save $(RUN_DIR)/p_$$rate --load $(RUN_DIR)/p_$$rate --save-interval 100 --save-replicas || exit; \
	done
	$(BIN)/python -m megatron_lossy.report $(RUN_DIR)

# The same model on two ranks with a lossy wide-area link between them, as root on Linux.
run-wan: .venv/installed
	$(BIN)/python -m benchmarks.run_wan $(WAN)

# The same model on islands that are killed, frozen, cut off and added. For example make run-churn CHURN="--replace"
run-churn: .venv/installed
	$(BIN)/python -m benchmarks.churn $(CHURN)

# TIMES: a folder for the times of all tests (.ci/run).
PYTEST = $(BIN)/python -m pytest -q $(ROOM:%=--room=%) $(if $(TIMES),--junitxml=$$(mktemp $(TIMES)/XXXX.xml))
# Each file of tests goes to one of as many workers as there are cores, at most 8.
SPREAD = -n logical --maxprocesses 8 --dist loadfile --no-loadscope-reorder

check: lint
	$(PYTEST) $(SPREAD) -m "not ranks and not programs and not slow and not nightly and not slurm"

test: .venv/installed
	$(PYTEST) $(SPREAD) -m "not programs and not slow and not nightly and not slurm"

# Tests that take the whole machine come last, one at a time.
test-long: .venv/installed
	$(PYTEST) $(SPREAD) -m "(programs or slow) and not alone and not nightly and not slurm"
	$(PYTEST) -m "alone and not nightly and not slurm" || [ $$? = 5 ]  # 5: a ROOM has none

test-all: .venv/installed
	$(MAKE) test
	$(MAKE) test-long

test-nightly: .venv/installed
	$(PYTEST) $(SPREAD) -m "nightly and not alone"
	$(PYTEST) -m "nightly and alone" || [ $$? = 5 ]

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In a real Slurm, which it starts on this machine and ends again.
test-slurm: .venv/installed
	@$(BIN)/python -m tests.slurm_cluster
	$(PYTEST) -m slurm tests/test_launch_slurm.py

bench: .venv/installed
	$(BIN)/python -m benchmarks.step_overhead

# How many small slips the tests notice: a sample, by hand. For example make mutants MUTANTS="--count 20 --rooms recovery"
mutants: .venv/installed
	$(BIN)/python scripts/mutants.py $(MUTANTS)

# Pages, and the tables and figures of all studies, most of which git ignores: they are made from each study.json.
docs: .venv/installed
	$(BIN)/python -m scripts.update_docs
	$(BIN)/python -m megatron_lossy.lab report benchmarks/results/studies/*
	$(BIN)/python -m benchmarks.study_sizes benchmarks/results/studies/size_* --out benchmarks/results/size

# The documentation as a site, in build/site/html.
site: .venv/installed
	$(BIN)/python -m scripts.site

report: .venv/installed
	$(BIN)/python -m scripts.report

# The hook contract over every Megatron that this machine can run, into docs/verified.md. For example
# make compat COMPAT="--python /path/to/venv312/bin/python --checkout HabanaAI-1.24.0=/path/to/Megatron-LM"
compat: .venv/installed
	$(BIN)/python scripts/compat.py $(COMPAT)

# The oldest; make test runs the newest that this Python allows.
compat-ci: .venv/installed
	$(BIN)/python scripts/compat.py --only 0.12.3 --no-docs

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,elastic]'
	touch $@
