# Builds and tests kube-ipvs. `make help` lists the targets.

SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := build

GO ?= go
CACHE := $(abspath $(or $(KUBE_IPVS_CACHE),.cache))
# LAB is for the user: it forces how the lab gets its kernel (host, kvm or tcg).
LAB_PROGRAM := $(CACHE)/bin/lab
# Directories with tests that have the build tag e2e. E2E_PACKAGES='pkg/nat' selects.
E2E_PACKAGES ?= $(filter-out test/conformance test/bench test/neighbours,$(patsubst %/,%,$(sort $(dir $(shell grep -rl --include='*_test.go' '^//go:build e2e' pkg cmd test)))))
ACTIONLINT := github.com/rhysd/actionlint/cmd/actionlint@v1.7.12
STATICCHECK := honnef.co/go/tools/cmd/staticcheck@v0.8.2

KUBERNETES_VERSION := v1.36.3
# component-base rejects a string that is not a version.
VERSION ?= $(or $(shell git describe --tags --match 'v[0-9]*' --dirty 2>/dev/null),v0.1.0-dev+$(or $(shell git rev-parse --short HEAD 2>/dev/null),unknown))
COMMIT := $(shell git rev-parse HEAD 2>/dev/null)
version_package := k8s.io/component-base/version
ldflags = -s -w -X $(version_package).gitVersion=$(1) -X $(version_package).gitCommit=$(2)

# All targets compile with the same flags, so that they share the build cache. Only `make race`
# needs cgo. Without debug information, which stripped programs do not
# have anyway, the compiler does an eighth less work.
compile_flags := -trimpath -gcflags=all=-dwarf=false
export GOFLAGS := $(filter-out $(compile_flags),$(GOFLAGS)) $(compile_flags)
export CGO_ENABLED := 0
go_test_binary = $(GO) test -c -ldflags '-s -w' -tags e2e

# RUN is a regular expression that selects tests to run in the lab.
RUN ?=
TIMEOUT ?= 40m
# Regular expressions for names of tests: ONLY selects tests, SKIP excludes them.
ONLY ?=
SKIP ?=
# If not empty, tests that can do less.
SHORT ?=
# Tests of `monitoring`, which installs Prometheus.
MONITORING := ^TestMonitoring$$
# Tests of `behaviour`: by issue, by case, and under faults. They take too long for `test`.
BEHAVIOUR := ^Test(Issue|Behaviour|Reliability)|^Test(Churn|ENIChurn|ENIMatrixThreeENIs|MissingKernelParts)$$
# Tests that `behaviour-short` omits: the longest, of which it runs others of the same kind.
BEHAVIOUR_LONG := ^Test(ENIMatrixThreeENIs|ENIChurn|Churn|MissingKernelParts|Behaviour(ClusterIPsByRoute|Inside|Reach|TakeOverFrom(NFTablesAndBack|Iptables|BothBackEnds)|TakeOverWaitsForRules|MatrixIPv6|GiveBackToIptables|KubeProxyAfterKill|Untracked|NodesOwnSource|ENILayouts|UnreadableRules)|Reliability(Soak|Reconfigured|Drift|Kills|Draining)|Issue(71514UDPChurn|121591Schedulers|56320Localhost|59507ForeignVirtualServers|98465PolicyOfDrop))$$
# Number of labs that share the end-to-end tests. An emulated lab has two processors. Two
# labs on two processors take longer than one after the other, and starve each other.
LABS ?= $(if $(RUN),1,$(if $(filter 1 2 3,$(shell nproc)),1,2))
CMD ?= sh -c "uname -r && ipvsadm -Ln"
LABFLAGS ?=
# The package of the lab's kernel, if not the distribution's stock one, such as
# linux-image-6.12-amd64 or linux-image-cloud-amd64.
KERNEL ?= $(LAB_KERNEL)
export LAB_KERNEL := $(KERNEL)

# $(call phase,text) prints a line with the seconds since make began.
START := $(shell date +%s)
phase = @printf '==> [%4ds] %s\n' $$(( $$(date +%s) - $(START) )) '$(1)'

.PHONY: docs docs-check build test unit e2e behaviour reliability soak bench bench-short bench-idle bench-counted bench-wide bench-profile conformance conformance-short mutations lint fuzz lab demo deps peers peer-kube-proxy peer-kubectl peer-helm peer-seccomp clean help

build: ## build bin/kube-ipvs, statically linked
	$(call phase,building bin/kube-ipvs)
	@$(GO) build -ldflags '$(call ldflags,$(VERSION),$(COMMIT))' -o bin/kube-ipvs ./cmd/proxy

# Files of a release besides the image: for each architecture the program and its SBOM,
# and the checksums. The build is reproducible.
RELEASE := bin/release
release_name = $(RELEASE)/kube-ipvs-$(VERSION)-linux-$(1)
.PHONY: release vulncheck
release: ## build bin/release: the program for all IMAGE_ARCHITECTURES, SBOMs (CycloneDX) and checksums
	@rm -rf $(RELEASE) && mkdir -p $(RELEASE)
	@for architecture in $(IMAGE_ARCHITECTURES); do \
		program=$(call release_name,$$architecture); \
		GOARCH=$$architecture $(GO) build -buildvcs=false -ldflags '$(call ldflags,$(VERSION),$(COMMIT))' -o $$program ./cmd/proxy && \
		$(GO) run ./hack/sbom $$program '$(VERSION)' $$program.cdx.json || exit; \
	done
	@cd $(RELEASE) && sha256sum kube-ipvs-* > SHA256SUMS && cat SHA256SUMS

# Adds the SBOMs to the release's files and checksums.
.PHONY: image-sbom
image-sbom: ## write SBOMs (CycloneDX) of the images in IMAGE_ARCHIVE to bin/release, and validate them; needs container-image
	@mkdir -p $(RELEASE)
	@$(GO) run ./hack/sbom image $(IMAGE_ARCHIVE) '$(VERSION)' $(RELEASE)/kube-ipvs-$(VERSION)-image-linux-ARCH.cdx.json
	@cd test/sbom && $(GO) run . $(abspath $(RELEASE))/*.cdx.json
	@cd $(RELEASE) && sha256sum kube-ipvs-* > SHA256SUMS && cat SHA256SUMS

.PHONY: reproducible chart
reproducible: export VERSION := $(VERSION)
reproducible: ## build the release and the image twice, in different directories, and compare them
	@hack/reproducible

chart: peer-helm ## package the Helm chart of VERSION in bin/chart
	@rm -rf bin/chart && mkdir -p bin/chart
	@$(PEERS)/helm package deploy/chart '$(VERSION)' bin/chart

GOVULNCHECK := golang.org/x/vuln/cmd/govulncheck@v1.1.4
vulncheck: ## find calls of Go code with known vulnerabilities; queries vuln.go.dev
	@$(GO) run $(GOVULNCHECK) ./...

# The program of one architecture, and the archive with the images of all architectures.
IMAGE_ARCHITECTURES ?= amd64 arm64
IMAGE_ARCHIVE ?= bin/kube-ipvs-image.tar
# Default: the version.
IMAGE_TAG ?=
image_program = $(CACHE)/container/kube-ipvs-$(1)
.PHONY: container-image
container-image: ## build the container image for all IMAGE_ARCHITECTURES as an OCI archive, without a container engine
	@for architecture in $(IMAGE_ARCHITECTURES); do \
		printf '==> [%4ds] building kube-ipvs for %s\n' $$(( $$(date +%s) - $(START) )) $$architecture; \
		GOARCH=$$architecture $(GO) build -ldflags '$(call ldflags,$(VERSION),$(COMMIT))' -o $(call image_program,$$architecture) ./cmd/proxy || exit; \
	done
	$(call phase,making $(IMAGE_ARCHIVE))
	@mkdir -p $(dir $(IMAGE_ARCHIVE))
	@$(GO) run ./deploy/image -cache $(CACHE)/container -out $(IMAGE_ARCHIVE) -version '$(VERSION)' -commit '$(COMMIT)' -tag '$(IMAGE_TAG)' \
		$(foreach architecture,$(IMAGE_ARCHITECTURES),$(architecture)=$(call image_program,$(architecture)))

# The image for this machine's architecture, for the lab.
.PHONY: lab-image
lab-image:
	@$(MAKE) --no-print-directory START=$(START) container-image IMAGE_ARCHITECTURES=$$($(GO) env GOHOSTARCH) IMAGE_ARCHIVE=$(CACHE)/container/lab.tar

# Not tested yet: the development machines have no container engine.
.PHONY: kind
kind: ## run upstream's sig-network tests on a kind cluster (needs Docker and kind); E2E_FOCUS, E2E_SKIP select
	@$(MAKE) --no-print-directory START=$(START) container-image IMAGE_ARCHITECTURES=$$($(GO) env GOHOSTARCH) IMAGE_ARCHIVE=$(CACHE)/container/kind.tar IMAGE_TAG=kind
	$(call phase,a kind cluster)
	@test/e2e/kind/run $(CACHE)/container/kind.tar $(KUBERNETES_VERSION)
	$(call phase,sig-network passed)

test: ## run the unit tests, then the end-to-end tests except those of `behaviour`
	@$(MAKE) --no-print-directory START=$(START) deps
	@for part in e2e-parts unit; do $(MAKE) --no-print-directory START=$(START) $$part || exit; done
	@$(MAKE) --no-print-directory START=$(START) e2e SKIP='$(BEHAVIOUR)|$(MONITORING)'

unit: deps ## run the unit tests (go vet is part of lint)
	$(call phase,unit tests)
	@$(GO) test -vet=off ./...
	@cd test/helm && $(GO) test ./...
	@cd test/sbom && $(GO) test ./...
	$(call phase,unit tests passed)

.PHONY: race
race: deps ## run the unit tests with the race detector, which compiles everything once more
	$(call phase,unit tests with the race detector)
	@CGO_ENABLED=1 $(GO) test -race -vet=off ./...
	$(call phase,no race is detected)

e2e: build e2e-binaries peers $(if $(filter test/e2e/demo,$(E2E_PACKAGES)),lab-image) ## run the end-to-end tests in the lab; RUN=regexp selects, LAB=host|kvm|tcg forces the kind of lab
	$(call phase,end-to-end tests in the lab)
	@hack/labs $(LABS) $(LAB_PROGRAM) -apiserver -coarse-timers -limit $(TIMEOUT) -env TIMEOUT=$(TIMEOUT) -env RUN="$$LAB_RUN" -env ONLY="$$LAB_ONLY" -env SKIP="$$LAB_SKIP" -env SHORT=$(SHORT) $(LABFLAGS) -- hack/e2e $(E2E_PACKAGES)
	$(call phase,end-to-end tests passed)
# Passed under other names, because make would expand the dollar signs in RUN=.
e2e: export LAB_RUN := $(value RUN)
e2e: export LAB_ONLY := $(value ONLY)
e2e: export LAB_SKIP := $(value SKIP)

.PHONY: behaviour-parts
behaviour-parts: peer-kube-proxy peer-kubectl peer-helm peer-seccomp peer-previous lab-image
behaviour: behaviour-parts ## run the end-to-end tests of Services from every kind of client, of users' issues, and of faults
	@$(MAKE) --no-print-directory START=$(START) e2e E2E_PACKAGES=test/e2e ONLY='$(BEHAVIOUR)'

.PHONY: behaviour-short
behaviour-short: behaviour-parts ## run behaviour without the longest tests (SHORT=1: less of some)
	@$(MAKE) --no-print-directory START=$(START) e2e E2E_PACKAGES=test/e2e ONLY='$(BEHAVIOUR)' SKIP='$(BEHAVIOUR_LONG)' SHORT=1

# Prerequisites of the end-to-end tests, built one after the other: two compilers in
# parallel would compile the same packages.
.PHONY: e2e-parts
e2e-parts:
	@for part in image build e2e-binaries peers lab-image; do $(MAKE) --no-print-directory START=$(START) $$part || exit; done

.PHONY: e2e-binaries $(LAB_PROGRAM)
e2e-binaries: deps
	$(call phase,compiling the end-to-end tests)
	@mkdir -p $(CACHE)/e2e
	@$(go_test_binary) -o $(CACHE)/e2e/ $(addprefix ./,$(E2E_PACKAGES))

$(LAB_PROGRAM):
	$(if $(wildcard $@),,$(call phase,building the runner of the lab))
	@$(GO) build -o $@ ./test/e2e/cmd/lab

deps: $(LAB_PROGRAM) ## install the programs that the tests need
	@$(LAB_PROGRAM) -deps

lab: $(LAB_PROGRAM) ## run CMD='...' with a kernel that has IPVS
	@$(LAB_PROGRAM) $(LABFLAGS) -- sh -c "$$LAB_CMD"
lab: export LAB_CMD := $(value CMD)

STEPS ?= 500
# The same seed generates the same steps. Without one, a run chooses one and prints it.
SEED ?=
# Number of labs that share the steps. Each runs both programs, which mostly wait.
SHARES ?= 3
conformance: deps ## compare what kube-proxy and kube-ipvs program, after each of STEPS=500 generated steps
	@$(MAKE) --no-print-directory START=$(START) -j2 build conformance-binary image peers peer-kube-proxy
	$(call phase,kube-proxy and kube-ipvs side by side in the lab)
	@hack/labs $(SHARES) $(LAB_PROGRAM) -apiserver -coarse-timers -limit 10h -env STEPS=$(STEPS) -env SEED=$(SEED) -env SHARES=$(SHARES) $(LABFLAGS) -- hack/conformance -test.run '^TestConformance$$'
	$(call phase,kube-ipvs conforms)

conformance-short: ## run conformance with 6 fixed steps
	@$(MAKE) --no-print-directory START=$(START) conformance STEPS=6 SEED=7 SHARES=1

mutations: deps ## break the plan in 15 ways, each of which the comparison must detect
	@$(MAKE) --no-print-directory START=$(START) -j2 build conformance-binary mutants image peers peer-kube-proxy
	$(call phase,kube-proxy and 15 broken kube-ipvs in the lab)
	@hack/labs 1 $(LAB_PROGRAM) -apiserver -limit 10h -env MUTATIONS=1 $(LABFLAGS) -- hack/conformance -test.run TestMutations
	$(call phase,all mutations are detected)

.PHONY: mutants
mutants:
	$(call phase,breaking the plan)
	@$(GO) run ./test/conformance/cmd/mutants $(CACHE)/mutants

.PHONY: conformance-binary
conformance-binary:
	$(call phase,compiling the comparison)
	@mkdir -p $(CACHE)/e2e
	@$(go_test_binary) -o $(CACHE)/e2e/ ./test/conformance

# Programs that write a node's network: helper programs that use the other projects' own
# code, each a separate module, and unpacked Debian packages.
NEIGHBOURS := $(CACHE)/neighbours
neighbour_programs := $(addprefix $(NEIGHBOURS)/,aws flannel metallb)
.PHONY: neighbours neighbours-short neighbours-parts neighbours-binary neighbours-page
neighbours: ## compare kube-proxy and kube-ipvs beside CNIs, policy engines and firewalls, and write docs/neighbours.md; RUN=regexp selects, KERNEL=linux-image-6.12-amd64 too
	@$(MAKE) --no-print-directory START=$(START) neighbours-parts
	@$(MAKE) --no-print-directory START=$(START) $(NEIGHBOURS)/debian
	$(call phase,beside neighbours in the lab)
	@hack/labs 1 $(LAB_PROGRAM) -apiserver -coarse-timers -limit 2h -out $(NEIGHBOURS)/out -env NEIGHBOURS_VERSION='$(VERSION)' -env NEIGHBOURS_KERNEL=$(KERNEL) $(LABFLAGS) -- hack/neighbours -test.run "$${LAB_RUN:-.}"
	@$(MAKE) --no-print-directory START=$(START) neighbours-page
neighbours: export LAB_RUN := $(value RUN)

# Excludes systemd-networkd, because unpacking its Debian packages takes minutes.
neighbours-short: ## run neighbours in a few fixed set-ups
	@$(MAKE) --no-print-directory START=$(START) neighbours-parts
	$(call phase,beside a few neighbours in the lab)
	@hack/labs 1 $(LAB_PROGRAM) -apiserver -coarse-timers -limit 30m $(LABFLAGS) -- hack/neighbours -test.short -test.run . -test.skip '^TestNeighbourNetworkd$$'
	$(call phase,no set-up is worse than under kube-proxy)

neighbours-page: ## write docs/neighbours.md from the last result of each set-up
	@$(GO) run ./test/neighbours/cmd/page $(NEIGHBOURS)/out/neighbours test/neighbours/results '$(KUBERNETES_VERSION)' >docs/neighbours.md.new && mv docs/neighbours.md.new docs/neighbours.md
	$(call phase,see docs/neighbours.md)

neighbours-parts: deps
	@for part in build neighbours-binary image peers peer-kube-proxy $(neighbour_programs); do $(MAKE) --no-print-directory START=$(START) $$part || exit; done

neighbours-binary:
	$(call phase,compiling the tests beside neighbours)
	@mkdir -p $(CACHE)/e2e
	@$(go_test_binary) -o $(CACHE)/e2e/ ./test/neighbours

$(NEIGHBOURS)/debian: test/neighbours/cmd/debian/main.go
	$(call phase,unpacking programs of Debian)
	@mkdir -p $(NEIGHBOURS) && rm -rf $@ && $(GO) run ./test/neighbours/cmd/debian $@ && touch $@

$(neighbour_programs): $(NEIGHBOURS)/%: test/neighbours/programs/%/go.mod test/neighbours/programs/%/go.sum test/neighbours/programs/%/main.go
	$(call phase,building $(@F) (a minute the first time))
	@mkdir -p $(NEIGHBOURS) && cd test/neighbours/programs/$* && $(GO) build -ldflags '-s -w' -o $@ .

# Numbers of Services to measure, and those for kube-proxy. With 10,000, its IPVS mode alone takes
# twenty minutes.
BENCH_SIZES ?= 100 1000 10000 44125
BENCH_PEER_SIZES ?= 1000 10000
BENCH_LAB = $(LAB_PROGRAM) -apiserver -limit 10h -memory 6G -out $(CACHE)/bench $(LABFLAGS)
# Facts about the run that the results include.
BENCH_FACTS = -env BENCH_VERSION='$(VERSION)' -env BENCH_PEER_VERSION='$(KUBERNETES_VERSION)' \
	-env BENCH_HOST="$$(nproc) processors, Linux $$(uname -r), load average $$(cut -d ' ' -f 1-3 /proc/loadavg) at the beginning"
bench: deps ## measure start, changes, memory and idle of kube-ipvs, kube-proxy and the raw floor, and write docs/performance
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers peer-kube-proxy
	$(call phase,measuring in the lab)
	@$(BENCH_LAB) -env BENCH_SIZES='$(BENCH_SIZES)' -env BENCH_PEER_SIZES='$(BENCH_PEER_SIZES)' $(BENCH_FACTS) -- hack/bench -test.run TestBench
	@mkdir -p docs/performance && cp $(CACHE)/bench/measurements.* docs/performance/
	$(call phase,see docs/performance/measurements.md)

# Names of what to count, separated by semicolons; empty means all. KUBE_IPVS is the
# program to run, possibly of another checkout.
WORLDS ?=
SUBJECTS ?=
PATHS ?=
WORKLOADS ?=
ABLATION ?=
VARIANTS ?=
KUBE_IPVS ?= bin/kube-ipvs
INSTRUCTIONS_SIZES ?= 10
INSTRUCTIONS_OUT := $(CACHE)/instructions
# The -limit is high because kube-proxy's IPVS mode starts slowly on one emulated processor.
instructions_lab = $(LAB_PROGRAM) -icount -apiserver -limit 10h -out $(INSTRUCTIONS_OUT) -env LAB_KUBE_IPVS=/out/kube-ipvs \
	-env BENCH_SIZES='$(INSTRUCTIONS_SIZES)' $(BENCH_FACTS) \
	-env INSTRUCTIONS_WORLDS='$(WORLDS)' -env INSTRUCTIONS_SUBJECTS='$(SUBJECTS)' -env INSTRUCTIONS_PATHS='$(PATHS)' \
	-env INSTRUCTIONS_WORKLOADS='$(WORKLOADS)' -env INSTRUCTIONS_ABLATION='$(ABLATION)' -env INSTRUCTIONS_VARIANTS='$(VARIANTS)' $(LABFLAGS) $(1) -- hack/bench

.PHONY: bench-instructions bench-instructions-floors bench-instructions-untracked bench-instructions-quick instructions-parts
bench-instructions: instructions-parts ## count the instructions that a Service adds to an exchange, and write docs/performance; WORLDS=, SUBJECTS=, PATHS=, WORKLOADS='a;b' select, ABLATION=jumps|rules, VARIANTS=1, INSTRUCTIONS_SIZES='10 1000'
	$(call phase,counting instructions in the lab)
	@$(call instructions_lab) -test.run '^TestInstructions$$'
	@cp $(INSTRUCTIONS_OUT)/figures.json test/bench/instructions/figures.json
	@$(GO) test ./test/bench -run '^TestPage$$' -update
	$(call phase,see docs/performance/dataplane.md)

# kube-proxy is not measured, so that a run takes minutes.
FLOORS := direct;floor;kube-ipvs;kube-ipvs, by port;kube-ipvs, reply routing
bench-instructions-floors: SUBJECTS := $(or $(SUBJECTS),$(FLOORS))
bench-instructions-floors: instructions-parts ## count the same for kube-ipvs and the floor only, and write their table in docs/performance
	$(call phase,counting instructions in the lab)
	@$(call instructions_lab,-env INSTRUCTIONS_FIGURES=test/bench/instructions/floors.json) -test.run '^TestInstructions$$'
	@cp $(INSTRUCTIONS_OUT)/figures.json test/bench/instructions/floors.json
	@$(GO) test ./test/bench -run '^TestPage$$' -update
	$(call phase,see docs/performance/dataplane.md)

# The traffic is TCP over IPv4.
bench-instructions-untracked: VARIANTS := untracked
bench-instructions-untracked: WORLDS := default
bench-instructions-untracked: SUBJECTS := direct;floor;kube-ipvs
bench-instructions-untracked: PATHS := ClusterIP;NodePort
bench-instructions-untracked: WORKLOADS := tcp-connection;tcp-round-trip
bench-instructions-untracked: instructions-parts ## count the same while traffic of pods is not tracked, and write the table in docs/performance
	$(call phase,counting instructions in the lab)
	@$(call instructions_lab,-env INSTRUCTIONS_FIGURES=test/bench/instructions/untracked.json) -test.run '^TestInstructions$$'
	@cp $(INSTRUCTIONS_OUT)/figures.json test/bench/instructions/untracked.json
	@$(GO) test ./test/bench -run '^TestPage$$' -update
	$(call phase,see docs/performance/dataplane.md)

bench-instructions-quick: WORLDS := $(or $(WORLDS),default)
bench-instructions-quick: SUBJECTS := $(or $(SUBJECTS),direct;floor;kube-ipvs)
bench-instructions-quick: PATHS := $(or $(PATHS),ClusterIP;NodePort)
bench-instructions-quick: instructions-parts ## print the same for a few subjects and paths
	$(call phase,counting instructions in the lab)
	@$(call instructions_lab) -test.run '^TestInstructions$$'

# UPDATE=1 writes test/bench/instructions/short.json instead of comparing with it.
UPDATE ?=
.PHONY: bench-instructions-short
bench-instructions-short: instructions-parts ## fail if an exchange takes 2 % more instructions than the committed figure; UPDATE=1 writes new figures
	$(call phase,counting instructions in the lab)
	@$(call instructions_lab,-env INSTRUCTIONS_UPDATE='$(UPDATE)') -test.run '^TestInstructionsShort$$'
	@$(if $(UPDATE),cp $(INSTRUCTIONS_OUT)/short.json test/bench/instructions/short.json)
	$(call phase,no exchange takes more instructions than it may)

instructions-parts: deps
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary traffic image peers peer-kube-proxy
	@mkdir -p $(INSTRUCTIONS_OUT) && cp $(KUBE_IPVS) $(INSTRUCTIONS_OUT)/kube-ipvs

.PHONY: traffic
traffic: ## build the client and the server of bench-instructions
	@mkdir -p $(CACHE)/e2e
	@gcc -O2 -Wall -Wextra -Werror -static -o $(CACHE)/e2e/traffic test/bench/instructions/traffic.c

bench-short: deps ## fail if a cost grows with the number of Services that should not
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers
	$(call phase,comparing costs in the lab)
	@$(BENCH_LAB) -icount -- hack/bench -test.run TestShapes
	$(call phase,costs have their shape)

bench-idle: deps ## measure an idle node with all checks, and a restart, with BENCH_SIZES Services
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers
	$(call phase,measuring in the lab)
	@$(BENCH_LAB) -env BENCH_SIZES='$(BENCH_SIZES)' -- hack/bench -test.run TestIdle

bench-counted: deps ## count the instructions of starts, one change, a pod's start, a large Service, a full conntrack table and idle, and write docs/performance/counted.md
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers
	$(call phase,counting instructions in the lab)
	@$(BENCH_LAB) -icount -env BENCH_SIZES='$(BENCH_SIZES)' $(BENCH_FACTS) -- hack/bench -test.run TestCounted
	@cp $(CACHE)/bench/counted.md docs/performance/
	$(call phase,see docs/performance/counted.md)

bench-wide: deps ## measure the cold start with BENCH_SIZES Services of 50 endpoints, beside kube-proxy's nftables mode
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers peer-kube-proxy
	$(call phase,measuring in the lab)
	@$(BENCH_LAB) -env BENCH_SIZES='$(BENCH_SIZES)' -- hack/bench -test.run TestWide

bench-profile: deps ## profile a cold start and changes with BENCH_SIZES Services, into .cache/bench
	@$(MAKE) --no-print-directory START=$(START) -j2 build bench-binary image peers
	$(call phase,profiling in the lab)
	@$(BENCH_LAB) -env BENCH_SIZES='$(BENCH_SIZES)' -- hack/bench -test.run TestProfile

.PHONY: bench-binary
bench-binary:
	$(call phase,compiling the measurements)
	@mkdir -p $(CACHE)/e2e
	@$(go_test_binary) -o $(CACHE)/e2e/ ./test/bench

# The reliability tests write their figures here. reliability-page copies them to
# test/reliability/figures and writes the page.
RELIABILITY_OUT = $(CACHE)/reliability
RELIABILITY_TESTS := ^TestReliability
reliability: ## inject all kinds of faults many times, and write docs/reliability.md
	@for part in fakes lab; do $(MAKE) --no-print-directory START=$(START) reliability-$$part || exit; done

.PHONY: prove prove-fixed prove-kernel
PROVE ?= 1h
prove: ## check every packet class of the fixed scenarios, then of random ones for PROVE=1h, and write the counts to docs/reliability.md (docs/proof.md)
	@$(MAKE) --no-print-directory START=$(START) RELIABILITY='$(VERSION)' prove-fixed
	$(call phase,random configurations for $(PROVE))
	@PROVE=$(PROVE) RELIABILITY='$(VERSION)' LAB_OUT=$(RELIABILITY_OUT) $(GO) test -count 1 -v -timeout 24h -tags prove -run '^TestRandom' ./test/prove
	@$(MAKE) --no-print-directory START=$(START) reliability-page
	$(call phase,no random configuration disagrees)

# Number of classes in each layout and family. CI sends 12.
CLASSES ?= 500
LAYOUT ?=
prove-kernel: ## send random packet classes in the lab, CLASSES=500 in each layout and family; SEED draws others, LAYOUT=1 to 10 selects a layout
	@mkdir -p $(RELIABILITY_OUT)
	@$(MAKE) --no-print-directory START=$(START) e2e LABS=1 E2E_PACKAGES=test/e2e ONLY='^TestBehaviourPacketClasses$$' \
		LABFLAGS="-env RELIABILITY='$(VERSION)' -out $(RELIABILITY_OUT) -env CLASSES=$(CLASSES) -env SEED=$(SEED) -env LAYOUT=$(LAYOUT) $(LABFLAGS)"
	@$(MAKE) --no-print-directory START=$(START) reliability-page

prove-fixed: ## check every packet class of the fixed scenarios, and of some random ones; RELIABILITY=VERSION stores the counts
	$(call phase,every packet class)
	@mkdir -p $(RELIABILITY_OUT)
	@PROVE=fixed RELIABILITY='$(RELIABILITY)' LAB_OUT=$(RELIABILITY_OUT) $(GO) test -count 1 -timeout 30m -tags prove ./test/prove -rapid.checks 50 -rapid.seed 1
	$(call phase,every packet class has the expected result)

.PHONY: reliability-fakes reliability-lab reliability-page
reliability-fakes: ## run the reliability tests that need no lab; RUN=regexp selects
	$(call phase,faults of fake kernels and API servers)
	@mkdir -p $(RELIABILITY_OUT)
	@RELIABILITY='$(VERSION)' LAB_OUT=$(RELIABILITY_OUT) $(GO) test -count 1 -timeout 2h -run "$${LAB_RUN:-$(RELIABILITY_TESTS)}" ./pkg/... ./cmd/...
	@$(MAKE) --no-print-directory START=$(START) reliability-page
reliability-fakes: export LAB_RUN := $(value RUN)

reliability-lab: lab-image peer-seccomp ## run the reliability tests that need the lab; ONLY=regexp selects
	@mkdir -p $(RELIABILITY_OUT)
	@$(MAKE) --no-print-directory START=$(START) e2e LABS=1 E2E_PACKAGES=test/e2e ONLY='$(or $(value ONLY),$(RELIABILITY_TESTS))' TIMEOUT=5h \
		LABFLAGS="-env RELIABILITY='$(VERSION)' -out $(RELIABILITY_OUT) $(LABFLAGS)"
	@$(MAKE) --no-print-directory START=$(START) reliability-page

SOAK ?= 30m
soak: ## combine all changes and faults for SOAK=30m, and check every connection
	@$(MAKE) --no-print-directory START=$(START) reliability-lab ONLY='^TestReliabilitySoak$$' LABFLAGS='-env SOAK=$(SOAK) $(LABFLAGS)'

reliability-page: ## write docs/reliability.md from the last figures
	@! ls $(RELIABILITY_OUT)/*.json >/dev/null 2>&1 || cp $(RELIABILITY_OUT)/*.json test/reliability/figures/
	@$(GO) test ./test/reliability -run '^TestPage$$' -update
	$(call phase,see docs/reliability.md)

demo: $(LAB_PROGRAM) ## show a pod on an ENI under kube-proxy's rules and under the container image of kube-ipvs
	@$(MAKE) --no-print-directory START=$(START) -j3 build demo-binary image
	@$(MAKE) --no-print-directory START=$(START) lab-image
	$(call phase,the demo)
	@$(LAB_PROGRAM) $(LABFLAGS) -- hack/demo
	$(call phase,the demo has passed)

.PHONY: demo-binary image
demo-binary:
	$(call phase,compiling the demo)
	@mkdir -p $(CACHE)/e2e
	@$(go_test_binary) -o $(CACHE)/e2e/ ./test/e2e/demo

image:
	$(call phase,preparing a kernel to run on)
	@$(LAB_PROGRAM) -prepare

docs: ## write all generated files: references, man pages, drawings, the tables of chains and of exceptions, deploy/install.yaml, the chart's schema, docs/conformance.md
	@$(GO) test ./pkg/config -run '^Test(Flag|Document)Reference$$' -update
	@$(GO) run ./hack/drawings docs/img
	@$(GO) test ./deploy -run '^Test(InstallManifest|ValuesSchema)$$' -update
	@$(GO) test ./docs -run '^Test(Chain|Exception)Table$$' -update
	@$(GO) test ./cmd/proxy -run '^(TestManPages|TestMetricsReference)$$' -update
	@$(GO) test ./test/upstream/judge -run '^TestPage$$' -update

docs-check: ## fail if a generated file is stale, or a link is dead
	@$(GO) test -count 1 -run '^(TestDrawings|TestInstallManifest|TestValuesSchema|TestFlagReference|TestDocumentReference|TestAnnotationReference|TestManPages|TestMetricsReference|TestChainTable|TestLinks|TestPage|TestTableInDocs)$$' ./pkg/config ./cmd/proxy ./deploy ./docs ./hack/drawings ./test/bench ./test/conformance ./test/reliability ./test/upstream/judge

.PHONY: monitoring
monitoring: ## run the queries of the dashboard and the alerts on a real Prometheus (installed with apt-get), which is fed by tests and by kube-ipvs in the lab
	@command -v prometheus >/dev/null || apt-get install -y -qq --no-install-recommends prometheus >/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends prometheus >/dev/null; }
	@promtool check rules deploy/chart/files/prometheus-rules.yaml
	@$(GO) test -count 1 -tags prometheus -run '^TestPrometheus$$' ./deploy
	@mkdir -p $(PEERS) && cp -u $$(command -v prometheus) $(PEERS)/prometheus
	@$(MAKE) --no-print-directory START=$(START) e2e E2E_PACKAGES=test/e2e ONLY='$(MONITORING)'

.PHONY: site
site: ## build the documentation as a site with search in bin/site (installs mkdocs with apt-get)
	@command -v mkdocs >/dev/null || apt-get install -y -qq mkdocs >/dev/null || { apt-get update -qq && apt-get install -y -qq mkdocs >/dev/null; }
	@$(GO) test -count 1 -run '^TestLinks$$' ./docs
	@mkdocs build -q -f hack/site/mkdocs.yml

.PHONY: site-check
site-check: site ## open each page of the site in a real browser, and search (installs chromium with apt-get)
	@command -v chromedriver >/dev/null && /usr/bin/python3 -c 'import selenium' 2>/dev/null || { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver python3-selenium fonts-dejavu-core >/dev/null; }
	@/usr/bin/python3 hack/site/browser.py $(CURDIR)/bin/site

FUZZTIME ?= 10m
# A regular expression that selects targets, such as nat.FuzzParseSave.
FUZZ ?= .
FUZZ_OUT = $(CACHE)/fuzz
fuzz: ## run each fuzz target for FUZZTIME=10m with the corpora in test/reliability/corpora, and write docs/reliability.md; FUZZ=regexp selects
	@rm -rf $(FUZZ_OUT) && mkdir -p $(FUZZ_OUT) $(RELIABILITY_OUT)
	@for file in $$(grep -rl --include='*_test.go' '^func Fuzz' pkg); do \
		for target in $$(sed -n 's/^func \(Fuzz[A-Za-z]*\)(.*/\1/p' $$file); do \
			package=$$(dirname $$file); \
			name=$$(basename $$package).$$target; \
			grep -qE "$$FUZZ_TARGETS" <<< $$name || continue; \
			printf '==> [%4ds] %s in %s\n' $$(( $$(date +%s) - $(START) )) $$target $$file; \
			hack/corpus restore $$package $$target || exit; \
			$(GO) test ./$$package -run '^$$' -fuzz "^$$target\$$" -fuzztime $(FUZZTIME) | tee $(FUZZ_OUT)/$$name.log || exit; \
			hack/corpus keep $$package $$target || exit; \
		done; \
	done
	@cp test/reliability/figures/input-fuzz.json $(RELIABILITY_OUT)/
	@$(GO) run ./test/reliability/cmd/fuzz '$(VERSION)' $(RELIABILITY_OUT)/input-fuzz.json $(FUZZ_OUT)/*.log
	@$(MAKE) --no-print-directory START=$(START) reliability-page
fuzz: export FUZZ_TARGETS := $(value FUZZ)

lint: ## run gofmt, go mod, go vet, staticcheck and actionlint
	$(call phase,gofmt)
	@unformatted=$$(gofmt -l cmd deploy hack pkg test); if [ -n "$$unformatted" ]; then echo "not formatted:"; echo "$$unformatted"; exit 1; fi
	$(call phase,go mod)
	@$(GO) mod tidy -diff
	@$(GO) mod verify
	$(call phase,go vet)
	@$(GO) vet ./...
	@$(GO) vet -tags e2e ./...
	@$(GO) vet -tags prove ./test/prove
	$(call phase,staticcheck)
	@$(GO) run $(STATICCHECK) ./...
	@$(GO) run $(STATICCHECK) -tags e2e ./...
	@$(GO) run $(STATICCHECK) -tags prove ./test/prove
	$(call phase,actionlint)
	@$(GO) run $(ACTIONLINT) -shellcheck= -pyflakes=
	$(call phase,lint passed)

# Programs that the tests run beside kube-ipvs, built from test/peers.
PEERS := $(CACHE)/peers
peers: $(PEERS)/etcd $(PEERS)/kube-apiserver ## build etcd and kube-apiserver for the lab
peer-kube-proxy: $(PEERS)/kube-proxy ## build kube-proxy, for comparisons
peer-kubectl: $(PEERS)/kubectl ## build kubectl
peer-helm: $(PEERS)/helm ## build a program that renders deploy/chart with Helm's engine
.PHONY: peer-helm-cli
peer-helm-cli: $(PEERS)/helm-cli ## build Helm
peer-seccomp: $(PEERS)/seccomp ## write the seccomp profile that container runtimes apply to the DaemonSet

# The commit to upgrade from and to downgrade to. Default: this checkout.
UPGRADE_FROM ?=
.PHONY: peer-previous
peer-previous: ## build another kube-ipvs, of UPGRADE_FROM=COMMIT, for the upgrade test
	$(call phase,building the kube-ipvs to upgrade from)
	@mkdir -p $(PEERS)
	@from=.; if [ -n "$(UPGRADE_FROM)" ]; then from=$(CACHE)/previous && rm -rf $$from && mkdir -p $$from && git archive $(UPGRADE_FROM) | tar -x -C $$from; fi && \
		cd $$from && $(GO) build -ldflags '$(call ldflags,v0.0.0-previous,$(UPGRADE_FROM))' -o $(PEERS)/previous ./cmd/proxy

# Its arguments are the DaemonSet's capabilities.
$(PEERS)/seccomp: test/seccomp/go.mod test/seccomp/go.sum test/seccomp/main.go
	$(call phase,writing the default filter of system calls)
	@mkdir -p $(PEERS) && cd test/seccomp && $(GO) run . CAP_NET_ADMIN CAP_NET_RAW >$@.new && mv $@.new $@

$(PEERS)/helm: test/helm/go.mod test/helm/go.sum test/helm/render.go
	$(call phase,building the engine of Helm)
	@mkdir -p $(PEERS)
	@cd test/helm && $(GO) build -o $@ .

$(PEERS)/helm-cli: test/helm/go.mod test/helm/go.sum
	$(call phase,building Helm (a minute the first time))
	@mkdir -p $(PEERS)
	@cd test/helm && $(GO) build -ldflags '-s -w' -o $@ helm.sh/helm/v3/cmd/helm

$(PEERS)/etcd: peer_package := go.etcd.io/etcd/server/v3
$(addprefix $(PEERS)/,kube-apiserver kube-proxy kubectl): peer_package = k8s.io/kubernetes/cmd/$(@F)

$(addprefix $(PEERS)/,etcd kubectl kube-apiserver kube-proxy): test/peers/go.mod test/peers/go.sum
	$(call phase,building $(@F) (minutes the first time))
	@cd test/peers && $(GO) build \
		-ldflags '$(call ldflags,$(KUBERNETES_VERSION),)' -o $@ $(peer_package)

# A cluster of QEMU guests with kubelets; the control plane runs on this machine.
UPSTREAM := $(CACHE)/upstream
CLUSTER_PROGRAM := $(CACHE)/bin/cluster
upstream_commands := kube-controller-manager kube-scheduler kubelet
upstream_images := agnhost regression-issue-74839
upstream_files := localhost.crt localhost.key
upstream_programs := $(addprefix $(UPSTREAM)/,$(upstream_commands) $(upstream_images) $(upstream_files) coredns loadbalancer pause imagenames)

$(addprefix $(UPSTREAM)/,$(upstream_commands)): upstream_package = k8s.io/kubernetes/cmd/$(@F)
$(addprefix $(UPSTREAM)/,$(upstream_images)): upstream_package = k8s.io/kubernetes/test/images/$(@F)
$(addprefix $(UPSTREAM)/,coredns loadbalancer pause imagenames): upstream_package = ./$(@F)
$(UPSTREAM)/loadbalancer: $(wildcard test/upstream/programs/loadbalancer/*.go)

$(addprefix $(UPSTREAM)/,$(upstream_files)): test/upstream/programs/go.mod
	@mkdir -p $(@D) && cp "$$(cd test/upstream/programs && $(GO) list -m -f '{{.Dir}}' k8s.io/kubernetes)/test/images/agnhost/porter/$(@F)" $@ && chmod 644 $@ && touch $@

$(filter-out $(addprefix %/,$(upstream_files)),$(upstream_programs)): test/upstream/programs/go.mod test/upstream/programs/go.sum
	$(call phase,building $(@F) (minutes the first time))
	@cd test/upstream/programs && $(GO) build -ldflags '$(call ldflags,$(KUBERNETES_VERSION),)' -o $@ $(upstream_package)

# Only the judge runs it.
$(UPSTREAM)/e2e.test: test/upstream/programs/go.mod test/upstream/programs/go.sum test/upstream/programs/e2e/e2e_test.go
	$(call phase,building $(@F) (minutes the first time))
	@cd test/upstream/programs && $(GO) test -c -ldflags '$(call ldflags,$(KUBERNETES_VERSION),)' -o $@ ./e2e

PROXY ?= kube-ipvs
NODES ?= 2
FOCUS ?=
cluster_image := $(CACHE)/container/cluster.tar
cluster_flags = -cache $(CACHE) -proxy $(PROXY) -nodes $(NODES) -image $(cluster_image) -program $(call image_program,$(shell $(GO) env GOHOSTARCH))

.PHONY: cluster cluster-down e2e-upstream e2e-upstream-short cluster-parts $(CLUSTER_PROGRAM)
$(CLUSTER_PROGRAM):
	@$(GO) build -o $@ ./test/upstream/cmd/cluster

# IMAGE_TAG is the tag in the cluster's manifests.
cluster-parts: deps $(CLUSTER_PROGRAM) $(upstream_programs) peers peer-kubectl $(if $(filter kube-proxy-%,$(PROXY)),peer-kube-proxy)
	@$(MAKE) --no-print-directory START=$(START) container-image IMAGE_ARCHITECTURES=$$($(GO) env GOHOSTARCH) IMAGE_ARCHIVE=$(cluster_image) IMAGE_TAG=cluster

cluster: cluster-parts ## start a cluster of QEMU guests with kubelets, and keep it; PROXY=kube-ipvs|kube-proxy-ipvs|kube-proxy-nftables
	$(call phase,bringing the cluster up)
	@$(CLUSTER_PROGRAM) $(cluster_flags) up

cluster-down: $(CLUSTER_PROGRAM) ## stop that cluster and remove it
	@$(CLUSTER_PROGRAM) $(cluster_flags) down

e2e-upstream: cluster-parts $(UPSTREAM)/e2e.test ## run Kubernetes' sig-network tests on that cluster, or on a new one, and write docs/conformance.md; continues an interrupted run; FOCUS=regexp selects
	$(call phase,upstream tests)
	@$(CLUSTER_PROGRAM) $(cluster_flags) -focus "$$CLUSTER_FOCUS" judge
e2e-upstream: export CLUSTER_FOCUS := $(value FOCUS)

# Prepares the nodes ahead of time.
.PHONY: cluster-prepared
cluster-prepared: cluster-parts $(UPSTREAM)/e2e.test
	$(call phase,preparing the nodes of a cluster)
	@$(CLUSTER_PROGRAM) $(cluster_flags) prepare

comma := ,
# The image has the name that the guides use.
walk_image := $(CACHE)/container/walk.tar
WALK ?= iptables ipvs nftables
WALK_NODES ?= 3
WALK_FLAGS ?=
.PHONY: cluster-walk cluster-walk-short cluster-walk-install walk-parts
walk-parts: cluster-parts peer-kube-proxy peer-helm-cli
	@$(MAKE) --no-print-directory START=$(START) container-image IMAGE_ARCHITECTURES=$$($(GO) env GOHOSTARCH) IMAGE_ARCHIVE=$(walk_image) IMAGE_TAG=v0.1.0

cluster-walk: walk-parts ## run the commands of the migration guide on a cluster with open connections, from each kube-proxy mode and back; WALK='iptables ipvs nftables'
	@for mode in $(WALK); do \
		printf '==> [%4ds] from kube-proxy in %s mode to kube-ipvs and back\n' $$(( $$(date +%s) - $(START) )) $$mode; \
		$(CLUSTER_PROGRAM) $(cluster_flags) -proxy kube-proxy-$$mode -nodes $(WALK_NODES) -extra $(walk_image) -helm $(PEERS)/helm-cli $(WALK_FLAGS) walk || exit; \
	done
	$(call phase,the migration guide has passed)

cluster-walk-install: walk-parts ## run the commands of the installation guides on a cluster
	$(call phase,the installation guides)
	@$(CLUSTER_PROGRAM) $(cluster_flags) -proxy kube-proxy-iptables -nodes 2 -extra $(walk_image)$(comma)$(cluster_image) -helm $(PEERS)/helm-cli -walk-install walk

cluster-walk-short: ## run cluster-walk from iptables mode for one node, and back
	@$(MAKE) --no-print-directory START=$(START) cluster-walk WALK=iptables WALK_NODES=2 WALK_FLAGS=-walk-short

cluster_short := $(CACHE)/cluster/short
e2e-upstream-short: cluster-parts $(UPSTREAM)/e2e.test ## run a dozen of these tests in minutes, without storing results
	$(call phase,a dozen upstream tests)
	@rm -rf $(cluster_short) && mkdir -p $(cluster_short)
	@$(CLUSTER_PROGRAM) $(cluster_flags) -short -results $(cluster_short) -page $(cluster_short)/conformance.md judge
	$(call phase,the dozen tests have passed)

clean: ## remove bin and the cache
	@rm -rf bin $(CACHE)

help: ## print this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
