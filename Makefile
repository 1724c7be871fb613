# The commands of this repository. `make help` lists them; each sets up what it needs first.
SHELL := /bin/bash
export PATH := $(HOME)/.cargo/bin:/usr/local/go/bin:$(PATH)
CARGO := cargo
BIN := target/release
# Packages that only judge the mesh: neither the demo nor a user runs them.
JUDGES := canal-corpora canal-differential canal-e2e canal-generated-policies canal-histories canal-testing canal-timing crashing-gateway xtask

.DEFAULT_GOAL := help
.PHONY: help demo up test test-timing test-compat render-istiod software soak programs build check sbom tidy bench-micro bench-peers bench-instructions bench-neighbours bench-transparency clean-worlds

help: ## this list
	@printf 'Canal: a sidecar-free, multi-tenant service mesh.\n\n'
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|'
	@printf '\nAll need root (network namespaces, cgroups, eBPF). `%s/canal --help` explains the mesh'"'"'s own command.\n' '$(BIN)'

demo: programs ## bring up three tenants and the cloud tier on one machine, drive real traffic, show what held, clean up (about a minute after the build)
	@$(BIN)/canal demo

up: programs ## the demo's world, kept up for exploring until ctrl-c
	@$(BIN)/canal up demo || [ $$? -eq 130 ] # 130: left by ctrl-c

test: ## the gate: install what is missing, build, run every test; closes with `N passed, N failed, N skipped`
	@setup/install build
	@$(CARGO) xtask test --install

test-timing: ## judge times, rates and losses: each timed test alone, 5 tries, release build; `make test-timing JOB='canal-e2e tier'` for a part; writes docs/timing.md
	@setup/install software
	@$(CARGO) xtask timing $(if $(JOB),'$(JOB)')

test-compat: ## what Canal can of others' APIs (at most 15 minutes): the documents of Istio's and Gateway API's corpora that it loads (`make test-compat ARGS='--left --kinds'` names the rest), then each HTTP feature of Istio beside Envoy with istiod's configuration, then Gateway API's conformance tests; writes docs/compatibility-policy.md, docs/envoy-differential.md and docs/features.md
	@setup/install compat
	@RUSTC_WORKSPACE_WRAPPER=clippy-driver $(CARGO) build --workspace --exclude canal-bench-micro --bins --tests --locked # as the gate's, which then has built all
	@mkdir -p target/conformance
	@missed=0; target/debug/canal-corpora --write-policy docs/compatibility-policy.md $(ARGS) || missed=$$?; \
	(cd tests/envoy && CGO_ENABLED=0 go test -count=1 . && CGO_ENABLED=0 go build -o ../../target/envoy/envoy-differential .) && \
	target/envoy/envoy-differential -write docs/envoy-differential.md || missed=$$?; \
	cd tests/conformance && export GOTOOLCHAIN=auto && go test -count=1 ./cmd/... ./report && \
	go test -c -o ../../target/conformance/driver . && ../../target/conformance/driver -test.timeout=15m && exit $$missed

render-istiod: ## render what istiod makes of the cases of tests/envoy for Envoy, again (tests/envoy/rendered); builds istiod's code, about 5 minutes the first time
	@setup/install compat
	@cd tests/envoy/istiod && go build -p 2 -o ../../../target/envoy/canal-bench-istiod .
	@target/envoy/canal-bench-istiod render tests/envoy

software: ## foreign software, unmodified, with and without the mesh (at most 20 minutes); writes docs/soak/software.md
	@setup/install software
	@$(CARGO) xtask soak software

soak: ## the long runs whole, or those that PART names: `make soak PART=compare`; each writes docs/soak/PART.md
	@setup/install software
	@$(CARGO) xtask soak $(PART)

programs: ## install what is missing and build the mesh's own programs and the samples (release)
	@setup/install build
	@$(CARGO) build --release --workspace --exclude 'canal-bench-*' $(addprefix --exclude ,$(JUDGES)) --locked

build: ## the same, and all benches
	@setup/install build
	@$(CARGO) build --release --workspace --locked

check: ## quick: format, lints, rules of the house, and all tests that make no namespaces and no worlds
	@$(CARGO) fmt --all --check
	@$(CARGO) xtask test tidy lint unit --no-worlds

sbom: ## the software bill of materials (CycloneDX), target/sbom.cdx.json
	@$(CARGO) xtask sbom

tidy: ## the rules of the house alone
	@$(CARGO) xtask tidy

bench-micro: build ## codec and router: ns per operation, bytes per route; compiler: ms for a large tenant and for a change of it
	@$(CARGO) bench -p canal-bench-micro
	@$(BIN)/canal-bench-micro compile

bench-peers: build ## gateway beside HAProxy, nginx and Envoy in one run: CPU per request
	@setup/install bench
	@$(BIN)/canal-bench-peers

bench-instructions: build ## gateway's instructions per request (callgrind); `make bench-instructions BEFORE=DIR BAR=1` fails beyond 1 % (3 % without BAR) more than the build in DIR
	@setup/install bench
	@$(BIN)/canal-bench-instructions $(if $(BEFORE),--before $(BEFORE)) $(if $(BAR),--bar $(BAR))

bench-neighbours: build ## p99 of quiet tenants beside a noisy one in one worker: gateway, HAProxy and Envoy
	@setup/install bench
	@$(BIN)/canal-bench-neighbours

bench-transparency: build ## what applications notice of the mesh, each figure beside its bar; `make bench-transparency WHAT=address`, `race`, `uploads`, `scaleout` or `direct`
	@setup/install bench
	@setup/install software
	@$(BIN)/canal-bench-transparency $(or $(WHAT),--help)

clean-worlds: ## remove whatever worlds killed runs left behind
	@$(BIN)/canal world gc
