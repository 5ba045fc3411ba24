# `make demo` and `make test` do all their own set-up in .venv; nothing else has to be installed.
# `make bench QUICK=1` (and so on) runs the smallest form of a long target, in seconds: does it run?
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
RUNS   ?= runs
SMALL  := $(if $(QUICK),--quick)
READY  := $(VENV)/.ready

.PHONY: demo test explore worlds starts paper paper-real attack bench bench-device bench-faults bench-hidden bench-large bench-links bench-lock bench-membership bench-slow-links bench-survival wan compare protos algorithm-pages scenario-reference reference-pages docs wheel ends clean

demo: $(READY)  ## train with all-reduce and with gossip beside a straggler; write runs/demo
	$(BIN)/p2plab run launcher/scenarios/one_slow.toml --out $(RUNS)/demo $(if $(QUICK),--samples 512,--check)

test: $(READY)  ## everything that CI runs
	$(BIN)/python -m pytest -n 2 --dist loadgroup $(TESTS)

explore: $(READY)  ## claims, barriers and wait-avoiding groups, exhaustively: every order of events, some faults
	$(BIN)/python -m p2ptrain.sim.explore $(if $(QUICK),one barrier,--full)

SEEDS ?= $(if $(QUICK),5,1000)
FIRST ?= 0

worlds: $(READY)  ## fleets by seed: cruel first, then healed; SEEDS=... FIRST=... ALGORITHM=... OPTIONS="sync=ssp gap=1"
	$(BIN)/python -m tests.worlds --seeds $(SEEDS) --first $(FIRST) $(if $(ALGORITHM),--algorithm $(ALGORITHM)) $(OPTIONS:%=--option %)

STARTS ?= $(if $(QUICK),2,100)

starts: $(READY)  ## four real processes start together, with equal and other seeds: one model at every version? STARTS=... FIRST=...
	$(BIN)/python -m tests.starts --starts $(STARTS) --first $(FIRST)

bench: $(READY)  ## averages beside Gloo and a bare gRPC exchange; runs/bench
	$(BIN)/python -m p2plab.bench.averages --out $(RUNS)/bench $(SMALL)

bench-links: $(READY)  ## averages over a link of 1 Gbit/s, with each codec; root, runs/bench-links
	$(BIN)/python -m p2plab.bench.links --out $(RUNS)/bench-links $(SMALL)

bench-device: $(READY)  ## copies, memory and steps on an accelerator, beside its limits; runs/bench-device
	$(BIN)/python -m p2plab.bench.device --out $(RUNS)/bench-device --check $(SMALL)

bench-hidden: $(READY)  ## how much of an all-reduce hides behind real passes, over a slow link; root, runs/bench-hidden
	$(BIN)/python -m p2plab.bench.hidden --out $(RUNS)/bench-hidden $(SMALL)

bench-slow-links: $(READY)  ## groups that succeed where an average takes half a minute; an hour and more, runs/bench-slow-links
	$(BIN)/python -m p2plab.bench.slow_links --out $(RUNS)/bench-slow-links --check $(SMALL)

bench-large: $(READY)  ## the memory of peers beside a model of 1 GB: averages, a newcomer, a checkpoint; 13 GB, runs/bench-large
	$(BIN)/python -m p2plab.bench.large --out $(RUNS)/bench-large --check $(SMALL)

PAGE ?= $(if $(QUICK),$(RUNS)/paper.md,docs/paper.md)

paper: $(READY)  ## the experiments of the papers, simulated; writes runs/paper and docs/paper.md
	$(BIN)/python -m p2plab.paper --out $(RUNS)/paper --page $(PAGE) $(SMALL)

paper-real: $(READY)  ## four of them for real, a quarter of an hour on two idle cores; runs/paper-real and docs/paper.md
	$(BIN)/python -m p2plab.paper --backend process --out $(RUNS)/paper-real --page $(PAGE) $(SMALL)

LINKS ?= $(if $(QUICK),$(RUNS)/links.md,docs/links.md)

wan: $(READY)  ## which algorithm for which links: homes, a phone, data centres, simulated; an hour of two idle cores, runs/wan and docs/links.md
	$(BIN)/python -m p2plab.wan --out $(RUNS)/wan --page $(LINKS) $(SMALL)

COMPARED ?= $(if $(QUICK),$(RUNS)/compare.md,docs/compare.md)
COMPARED_SEEDS ?= 1

compare: $(READY)  ## all algorithms over all scenarios, simulated; half an hour of two idle cores, runs/compare and docs/compare.md
	$(BIN)/python -m p2plab.across --out $(RUNS)/compare --page $(COMPARED) --seeds $(COMPARED_SEEDS) $(SMALL)

PROTOS ?= p2ptrain/net/_pb
PAGES  ?= docs/algorithms
WHEELS ?= dist

protos: $(READY)  ## regenerate p2ptrain/net/_pb from protos/
	$(BIN)/python tests/tidy/generate_protos.py $(PROTOS)

algorithm-pages: $(READY)  ## regenerate docs/algorithms from the docstrings
	$(BIN)/python tests/tidy/generate_algorithm_pages.py $(PAGES)

SCENARIO_REFERENCE ?= docs/scenario-reference.md

scenario-reference: $(READY)  ## regenerate docs/scenario-reference.md from the dataclasses
	$(BIN)/python -m tests.tidy.generate_scenario_reference $(SCENARIO_REFERENCE)

REFERENCE ?= docs/reference
SITE      ?= $(RUNS)/docs

reference-pages: $(READY)  ## regenerate docs/reference/settings.md, errors.md and records.md from the code
	$(BIN)/python tests/tidy/generate_reference_pages.py $(REFERENCE)

docs: $(READY)  ## the documentation as a site: runs/docs/index.html; a warning is an error
	$(BIN)/python -m sphinx --fail-on-warning --keep-going --quiet -b html docs $(SITE)

bench-lock: $(READY)  ## how fast 64 peers that ask all the time find someone free; runs/bench-lock
	$(BIN)/python -m p2plab.bench.lock --out $(RUNS)/bench-lock --check $(SMALL)

bench-survival: $(READY)  ## kill a whole swarm and start it again; train beside checkpoints of 400 MB; runs/bench-survival
	$(BIN)/python -m p2plab.bench.survival --out $(RUNS)/bench-survival --check $(SMALL)

bench-faults: $(READY)  ## what it costs three peers that the fourth is killed, frozen, cut off, or slow; runs/bench-faults
	$(BIN)/python -m p2plab.bench.faults --out $(RUNS)/bench-faults $(SMALL)

attack: $(READY)  ## strangers, a lying member, and a hundred that come and go, against three peers; 40 minutes, runs/attack
	$(BIN)/python -m p2plab.bench.attack --out $(RUNS)/attack --check $(SMALL)

bench-membership: $(READY)  ## how soon all know of a join and of a death, up to 1,024 peers; runs/bench-membership
	$(BIN)/python -m p2plab.bench.membership --out $(RUNS)/bench-membership --check $(SMALL)

wheel: $(READY)  ## a source distribution in dist/, and a pure Python wheel that is built from it
	$(BIN)/python -m build $(BUILD) --outdir $(WHEELS)

ends: $(READY)  ## the tests of the network with the oldest dependencies that we allow, and with the newest
	$(BIN)/python tests/tidy/ends_of_the_range.py --out $(RUNS)/ends $(SMALL)

clean:
	rm -rf $(VENV) build dist runs *.egg-info

.PHONY: chaos
chaos: $(READY)  ## eight peers through ten bad minutes, and undisturbed: runs/chaos (BACKEND=docker: in containers)
	$(BIN)/python -m p2plab.bench.chaos --out $(RUNS)/chaos --backend $(or $(BACKEND),process) --check $(SMALL)

# pip goes first: the one that a new environment has may be too old for dependency groups. Then torch, by
# its exact version: an unpinned torch can drag in gigabytes.
$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "p2ptrain needs Python 3.11 or later; try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet "$$(grep '^pip==' constraints.txt)"
	$(BIN)/python -m pip install --quiet "$$(grep '^torch==' constraints.txt)" -c constraints.txt
	$(BIN)/python -m pip install --quiet -e '.[lab]' --group test -c constraints.txt
	touch $(READY)
