# SPDX-License-Identifier: BSD-3-Clause
# A thin front: `make build`, `make test`, `make train`; `make help` lists the rest. CMake does the building.
BUILD ?= build
RUN := $(BUILD)/psluajit
STEPS ?=
DATA ?=
OUT ?= out/train
RESUME ?=
REPLACE ?=
SEED ?= 1
HOURS ?=

.PHONY: all setup setup-cluster build build-all cuda test check test-cluster test-oracle test-isa prove-cuda train \
  pictures site deb install uninstall help clean bench c-tests-sanitized asan tsan fuzz faults

all: build

help:
	@echo 'make build       install missing packages and build build/psluajit (make cuda: with the CUDA plug-in)'
	@echo 'make train       train a small GPT-2 for two minutes; DATA=my.txt STEPS=n OUT=folder RESUME=1 REPLACE=1'
	@echo 'make install     install psluajit, its manual pages and its guides; DESTDIR=folder'
	@echo 'make uninstall   remove what make install installed'
	@echo 'make deb         Debian packages in out/'
	@echo 'make site        the guides as HTML in out/site (make setup-cluster installs what it needs)'
	@echo 'make pictures    draw the pictures of the guides'
	@echo 'make check       tests in three minutes; make test: C tests and specs; test-cluster, test-isa, test-oracle'
	@echo 'make bench       speed of training; make faults, fuzz, asan, tsan, prove-cuda: spec/README.md'
	@echo 'make clean       remove the build folders'

# Installs what a list names and is missing, with sudo when not root. Without network, fine when all is there.
define install
missing=""; for p in $$(grep -v '^#' $(1)); do \
  dpkg-query -W -f '$${Status}' $$p 2>/dev/null | grep -q 'ok installed' || missing="$$missing $$p"; done; \
if [ -n "$$missing" ]; then \
  echo "installing:$$missing"; \
  if [ "$$(id -u)" = 0 ]; then sudo=""; else sudo=sudo; fi; \
  $$sudo apt-get update -q && \
  DEBIAN_FRONTEND=noninteractive $$sudo apt-get install -qy --no-install-recommends $$missing; \
fi
endef

setup:
	@$(call install,packages.apt)

# MPI, Slurm; the tests skip what is not there.
setup-cluster:
	@{ $(call install,packages-cluster.apt); } || echo "not all of packages-cluster.apt is there: its tests are skipped"

# A build folder that came along with a copied tree would build the tree it was made for.
define configure
if [ -f $(BUILD)/CMakeCache.txt ] && \
  ! grep -qxF 'CMAKE_HOME_DIRECTORY:INTERNAL=$(CURDIR)' $(BUILD)/CMakeCache.txt; then \
  rm -rf $(BUILD)/CMakeCache.txt $(BUILD)/CMakeFiles; \
fi; \
cmake -S . -B $(BUILD) -G Ninja $(1) >$(BUILD).log 2>&1 || { cat $(BUILD).log; exit 1; }; rm -f $(BUILD).log
endef

# What this machine can run: psluajit, and the CUDA plug-in where there is a GPU (`make cuda` has it anywhere).
build: setup
	@$(call configure,)
	@cmake --build $(BUILD) --target program

# The same with the C tests, the CUDA plug-in where it can be compiled, and the emulated one.
build-all: setup
	@$(call configure,)
	@cmake --build $(BUILD)

test: build-all
	@tools/test.sh $(BUILD)

# Something of every folder of spec/, in under three minutes: before a commit.
check: build
	@cmake --build $(BUILD) --target psluajit_faults $$(grep -v '^#' spec/c/check.txt)
	@tools/test.sh $(BUILD) $$(grep -hv '^#' spec/c/check.txt spec/check.txt)

# Real mpirun, srun and torchrun, and two hosts in network namespaces.
test-cluster: build-all setup-cluster
	@tools/test.sh $(BUILD) spec/cluster/cluster_spec.lua

# Every test on every instruction set that this machine has: an hour or so.
test-isa: build-all
	@PS_TEST_ISA=all tools/test.sh $(BUILD)

# libps_cuda.so where nvcc was found.
define cuda_plugin
! grep -q '^build psluajit_cuda:' $(BUILD)/build.ninja || nice cmake --build $(BUILD) --target psluajit_cuda
endef

# Drawn cases against PyTorch, of exact versions in a virtual environment that is made on the first run.
test-oracle: build
	@$(cuda_plugin)
	@tools/oracle.sh run $(BUILD)

# Barriers and races of every cuda kernel, proved from its PTX, and facts of the machine code: an hour, without a GPU.
prove-cuda: build
	@$(cuda_plugin)
	@python=$$(tools/oracle.sh python) && nice $$python tools/prove_cuda/prove.py --build $(BUILD)

# The CUDA plug-in libps_cuda.so, next to psluajit; an error if nvcc or cuBLASLt is missing.
cuda: setup
	@$(call configure,-DPS_CUDA=ON)
	@cmake --build $(BUILD) --target program

# Trains a small GPT-2 on the text of the package fortunes, or on DATA=my.txt, for about two minutes, or for STEPS=n.
# An earlier run in OUT is continued with RESUME=1, and replaced with REPLACE=1.
train: build
	@if [ -e '$(OUT)/latest' ] && [ -z '$(RESUME)$(REPLACE)' ]; then \
	  echo "make train: $(OUT) has a run: RESUME=1 continues it, REPLACE=1 starts a new one in its place, OUT=folder" \
	    "keeps both"; exit 1; \
	fi
	@$(RUN) examples/train_gpt2.lua --out '$(OUT)' $(if $(DATA),--data '$(DATA)') \
	  $(if $(RESUME),--resume,$(if $(REPLACE),--force)) $(if $(STEPS),--steps $(STEPS),$(if $(RESUME),,--minutes 2))

# Draws the pictures of the guides anew.
pictures: build
	@$(RUN) tools/pictures.lua

# The guides as HTML that needs no network, in out/site, by Sphinx with myst-parser and furo (packages-cluster.apt).
site: build
	@command -v sphinx-build >/dev/null || { echo "make site needs Debian's python3-sphinx, python3-myst-parser and \
	furo; make setup-cluster installs them"; exit 1; }
	@tools/site.sh $(BUILD) out/site

# The site in the build folder, from where packages and installations take it.
define packed_site
rm -rf $(BUILD)/site; \
if command -v sphinx-build >/dev/null; then tools/site.sh $(BUILD) $(BUILD)/site; \
else echo "Sphinx is not installed (make setup-cluster installs it): the guides come without their HTML"; fi
endef

# Debian packages in out/: psluajit, and the CUDA plug-in if it was built.
deb: build
	@$(packed_site)
	@tools/deb.sh $(BUILD) out

install: build
	@$(packed_site)
	@cmake --install $(BUILD)

# Removes the files of installed.txt, which an installation writes (cmake/installed.cmake), and folders that are empty.
uninstall:
	@prefix="$$DESTDIR$$(sed -n 's/^CMAKE_INSTALL_PREFIX:PATH=//p' $(BUILD)/CMakeCache.txt)" && \
	list="$$prefix/share/psluajit/installed.txt" && \
	{ [ -f "$$list" ] || { echo "make uninstall: there is no $$list, so psluajit is not installed there"; exit 1; }; } && \
	while IFS= read -r file; do rm -f "$$prefix/$$file"; done <"$$list" && \
	sed -n 's,/[^/]*$$,,p' "$$list" | grep /psluajit | sort -ru | (cd "$$prefix" && \
	  xargs -d '\n' rmdir -p --ignore-fail-on-non-empty 2>/dev/null); \
	rm -f "$$list"; rmdir "$$prefix/share/psluajit" 2>/dev/null || true

bench: build
	@$(RUN) bench/train.lua
	@$(RUN) bench/train.lua --dtype fp32

# Only the C tests, for both sanitizers.
c-tests-sanitized: setup
	@for preset in asan tsan; do \
	  cmake --preset $$preset >build-$$preset.log 2>&1 || { cat build-$$preset.log; exit 1; }; rm -f build-$$preset.log; \
	  cmake --build --preset $$preset --target c_tests || exit 1; \
	done

asan tsan:
	@cmake --preset $@ && cmake --build --preset $@ && PS_TEST_ISA=none PS_TEST_LIMIT_S=20000 tools/test.sh build-$@

# Jobs under drawn faults (docs/reliability.md): 100 seeds from SEED on, or for HOURS=8.
faults: build
	@cmake --build $(BUILD) --target psluajit_faults
	@$(RUN) tools/faults.lua --seeds $(SEED):$$(($(SEED) + 99)) --jobs 2 $(if $(HOURS),--hours $(HOURS)) --keep

fuzz:
	@cmake --preset fuzz && cmake --build --preset fuzz

clean:
	rm -rf $(BUILD) build-asan build-tsan build-fuzz
