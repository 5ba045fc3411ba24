# `make demo` and `make test` do all their own set-up in .venv; nothing else has to be installed.
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test explore worlds paper paper-real bench bench-faults bench-links bench-lock bench-membership protos algorithm-pages wheel clean

demo: $(READY)  ## train with all-reduce and with gossip beside a straggler; write runs/demo
	$(BIN)/p2plab run launcher/scenarios/one_slow.toml --out runs/demo --check

test: $(READY)  ## everything that CI runs
	$(BIN)/python -m pytest -n 2 --dist loadgroup

explore: $(READY)  ## claims, barriers and wait-avoiding groups, exhaustively: every order of events, some faults
	$(BIN)/python -m p2ptrain.sim.explore --full

SEEDS ?= 1000
FIRST ?= 0

worlds: $(READY)  ## fleets by seed: cruel first, then healed; SEEDS=... FIRST=...
	$(BIN)/python -m tests.worlds --seeds $(SEEDS) --first $(FIRST)

bench: $(READY)  ## averages beside Gloo and a bare gRPC swap; runs/bench
	$(BIN)/python -m launcher.bench.averages --out runs/bench

bench-links: $(READY)  ## averages over a link of 1 Gbit/s, with each codec; root, runs/bench-links
	$(BIN)/python -m launcher.bench.links --out runs/bench-links

paper: $(READY)  ## the experiments of the papers, simulated; writes runs/paper and docs/paper.md
	$(BIN)/python -m launcher.paper --out runs/paper --page docs/paper.md

paper-real: $(READY)  ## four of them for real, a quarter of an hour on two idle cores; runs/paper-real and docs/paper.md
	$(BIN)/python -m launcher.paper --backend process --out runs/paper-real --page docs/paper.md

protos: $(READY)  ## regenerate p2ptrain/net/_pb from protos/
	$(BIN)/python tests/tidy/generate_protos.py p2ptrain/net/_pb

algorithm-pages: $(READY)  ## regenerate docs/algorithms from the docstrings
	$(BIN)/python tests/tidy/generate_algorithm_pages.py docs/algorithms

bench-lock: $(READY)  ## how fast 64 peers that ask all the time find someone free; runs/bench-lock
	$(BIN)/python -m launcher.bench.lock --out runs/bench-lock --check

bench-faults: $(READY)  ## what it costs three peers that the fourth is killed, frozen, cut off, or slow; runs/bench-faults
	$(BIN)/python -m launcher.bench.faults --out runs/bench-faults

bench-membership: $(READY)  ## how soon all know of a join and of a death, up to 1,024 peers; runs/bench-membership
	$(BIN)/python -m launcher.bench.membership --out runs/bench-membership --check

wheel: $(READY)  ## a pure Python wheel in dist/
	$(BIN)/pip wheel --quiet --no-deps --wheel-dir dist .

clean:
	rm -rf $(VENV) build dist runs *.egg-info

.PHONY: chaos
chaos: $(READY)  ## eight peers through ten bad minutes, and undisturbed: runs/chaos (BACKEND=docker: in containers)
	$(BIN)/python -m launcher.bench.chaos --out runs/chaos --backend $(or $(BACKEND),process) --check

# torch goes first and by its exact version: an unpinned torch can drag in gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2ptrain needs Python 3.11 or later; try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[test]' -c constraints.txt
	touch $(READY)
