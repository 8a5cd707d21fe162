# make run: set up and run the main job. make check: lint, and the tests that start no process. make test: those that start
# ranks as well. make test-all: all. make test ROOM=recovery: those of one room of megatron_lossy (tests/rooms.py).
PYTHON ?= python3
BIN := .venv/bin
RUN_DIR ?= runs/tiny
# Several ranks on few cores crawl if each of them starts as many threads as there are cores.
export OMP_NUM_THREADS := 1
# Each rank imports the file of its test: without bytecode on disk it compiles it, too.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: run run-wan run-churn check test lint test-all test-slurm two-1 two-2 bench mutants docs compat compat-ci

run: .venv/installed
	$(BIN)/python -m torch.distributed.run --standalone --nproc-per-node 4 -m megatron_lossy.lab sweep \
		--config configs/tiny/llama_1m.yaml --rates 0 0.1 0.2 0.4 --out $(RUN_DIR)

# The same model on two ranks with a lossy wide-area link between them, as root on Linux.
run-wan: .venv/installed
	$(BIN)/python -m benchmarks.run_wan $(WAN)

# The same model on islands that are killed, frozen, cut off and added. For example make run-churn CHURN="--replace"
run-churn: .venv/installed
	$(BIN)/python -m benchmarks.churn $(CHURN)

PYTEST = $(BIN)/python -m pytest -q $(ROOM:%=--room=%)
# Two runs of pytest at a time, each of which takes the next file of tests that the other has not taken.
TWO = @folder=$$(mktemp -d); $(MAKE) --no-print-directory -j2 two-1 two-2 SHARE=$$folder TESTS="$(TESTS)"; \
	status=$$?; rm -r $$folder; exit $$status

check: TESTS = not ranks and not programs and not slow and not slurm
check: lint
	$(TWO)

test: TESTS = not programs and not slow and not slurm
test: .venv/installed
	$(TWO)

two-1 two-2:
	@$(PYTEST) --share=$(SHARE) -m "$(TESTS)"

# Programs and long chains as well, some of which take the whole machine: one run of pytest.
test-all: .venv/installed
	$(PYTEST) -m "not slurm"

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# In a real Slurm, which it starts on this machine and ends again.
test-slurm: .venv/installed
	@$(BIN)/python -m tests.slurm_cluster
	$(BIN)/python -m pytest -q -m slurm tests/test_launch_slurm.py

bench: .venv/installed
	$(BIN)/python -m benchmarks.step_overhead

# How many small slips the tests notice: a sample, for hours, by hand. For example make mutants MUTANTS="--count 20 --jobs 2"
mutants: .venv/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[mutants]'
	$(BIN)/python scripts/mutants.py $(MUTANTS)

# Pages, and the tables and figures of all studies, most of which git ignores: they are made from each study.json.
docs: .venv/installed
	$(BIN)/python -m scripts.update_docs
	$(BIN)/python -m megatron_lossy.lab report benchmarks/results/studies/*
	$(BIN)/python -m megatron_lossy.lab size benchmarks/results/studies/size_* --out benchmarks/results/size

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
