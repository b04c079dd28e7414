# core.mk - builds and tests what is C and knows neither torch nor Python: the core (csrc/core) and the conductors of the
# passes (csrc/pass), which are linked with fakes in the shim's place.
# Included by the Makefile; also works alone: make -f tests/core.mk test-core
# All output goes to build/core. CC, CXX, CORE_CFLAGS, FUZZ_CC, FUZZ_SECONDS, GCOV, PYTHON can be set.

CORE_BUILD := build/core
CORE_WARN := -Wall -Wextra -Wpedantic -Wconversion -Wshadow -Werror
CORE_INCLUDE := -Icsrc -Itests/c
CORE_CFLAGS ?=
CORE_SANITIZE := -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FUZZ_CC ?= clang
JOBS ?= 2
PYTHON ?= python3
GCOV ?= gcov
FUZZ_SECONDS ?= 60
FUZZ_TARGET ?= fuzz_plan

CORE_SOURCES := $(sort $(patsubst csrc/%,%,$(wildcard csrc/core/*/*.c csrc/instruments/core/*.c)))
PASS_SOURCES := $(sort $(patsubst csrc/%,%,$(wildcard csrc/pass/*.c)))
CORE_HEADERS := $(sort $(wildcard csrc/core/*/*.h csrc/instruments/core/*.h csrc/pass/*.h) csrc/shim/input/zbp_input.h csrc/shim/weight/zbp_weight.h \
	csrc/shim/torch/zbp_error.h)
CORE_TESTS := test_alloc test_map test_graph test_plan test_blocks test_record test_layout \
	test_book test_pass test_kind test_split
FUZZ_TARGETS := fuzz_plan fuzz_weight_pass fuzz_record
FUZZ_WITH_fuzz_weight_pass = tests/c/fake_shim.c $(PASS_SOURCES:%=csrc/%)
CORE_LIB := $(CORE_BUILD)/libzbpcore.a

# The flavours: plain is what the library ships; count calls a function per basic block, for test_large; ubsan asks for more than the language does, optimised as what
# ships is; tsan is for what several threads do.
CORE_FLAGS_plain := -O2 -g -fPIC
CORE_FLAGS_asan := -O1 -g $(CORE_SANITIZE)
CORE_FLAGS_count := -O2 -g
CORE_FLAGS_cov := -O0 -g --coverage
CORE_UNDEFINED := -fsanitize=undefined,float-divide-by-zero,float-cast-overflow,bounds-strict -fno-sanitize-recover=all
CORE_FLAGS_ubsan := -O2 -g $(CORE_UNDEFINED)
CORE_FLAGS_tsan := -O1 -g -fsanitize=thread
CORE_LINK_ubsan := $(CORE_UNDEFINED)
CORE_LINK_tsan := -fsanitize=thread
CORE_LINK_asan := $(CORE_SANITIZE)
CORE_LINK_cov := --coverage
# In the place of the core's doors to libc: see tests/c/counting.c.
CORE_LINK_COUNTING := -Wl,--wrap=zbpi_resize,--wrap=zbpi_free

# $(1): the flavour. Objects, the library, and a program per tests/c/X.c that has a main.
define CORE_FLAVOUR
CORE_OBJECTS_$(1) := $$(CORE_SOURCES:%.c=$$(CORE_BUILD)/$(1)/objects/%.o)
PASS_OBJECTS_$(1) := $$(PASS_SOURCES:%.c=$$(CORE_BUILD)/$(1)/objects/%.o)

$$(CORE_BUILD)/$(1)/objects/%.o: csrc/%.c tests/core.mk
	@mkdir -p $$(@D)
	@$$(CC) -std=c11 $$(CORE_WARN) $$(CORE_FLAGS_$(1)) $$(CORE_TRACE_$(1)) $$(CORE_CFLAGS) -Icsrc \
		-MMD -MP -c $$< -o $$@

$$(CORE_BUILD)/$(1)/tests/%.o: tests/c/%.c tests/core.mk
	@mkdir -p $$(@D)
	@$$(CC) -std=c11 $$(CORE_WARN) $$(CORE_FLAGS_$(1)) $$(CORE_CFLAGS) $$(CORE_INCLUDE) \
		-MMD -MP -c $$< -o $$@

$$(CORE_BUILD)/$(1)/bin/%: $$(CORE_BUILD)/$(1)/tests/%.o $$(CORE_BUILD)/$(1)/tests/model.o \
		$$(CORE_BUILD)/$(1)/tests/counting.o $$(CORE_OBJECTS_$(1))
	@mkdir -p $$(@D)
	@$$(CC) $$(CORE_LINK_$(1)) $$(CORE_LINK_COUNTING) $$^ -pthread -o $$@

$(FUZZ_TARGETS:%=$$(CORE_BUILD)/$(1)/bin/%): $$(CORE_BUILD)/$(1)/tests/fuzz_main.o

# What runs passes has a fake in the shim's place.
$$(CORE_BUILD)/$(1)/bin/fuzz_weight_pass $$(CORE_BUILD)/$(1)/bin/test_pass: $$(CORE_BUILD)/$(1)/tests/fake_shim.o \
	$$(PASS_OBJECTS_$(1))

.SECONDARY: $$(CORE_OBJECTS_$(1)) $$(PASS_OBJECTS_$(1)) $$(patsubst tests/c/%.c,$$(CORE_BUILD)/$(1)/tests/%.o,$$(wildcard tests/c/*.c))
-include $$(wildcard $$(CORE_BUILD)/$(1)/objects/*/*.d $$(CORE_BUILD)/$(1)/objects/*/*/*.d $$(CORE_BUILD)/$(1)/tests/*.d)
endef

CORE_TRACE_count := -fsanitize-coverage=trace-pc
$(foreach flavour,plain asan count cov ubsan tsan,$(eval $(call CORE_FLAVOUR,$(flavour))))

$(CORE_LIB): $(CORE_OBJECTS_plain)
	@rm -f $@
	@$(AR) rcs $@ $^

# Each header alone, as C and as C++; then a C++ program that uses them.
$(CORE_BUILD)/headers: tests/c/headers.cc $(CORE_HEADERS) $(CORE_LIB) tests/core.mk
	@for header in $(CORE_HEADERS); do \
		echo 'typedef int one;' | $(CC) -std=c11 $(CORE_WARN) -Icsrc -fsyntax-only -include $$header -x c - && \
		$(CXX) -std=c++17 -Wall -Wextra -Werror -Icsrc \
			-fsyntax-only -include $$header -x c++ /dev/null || exit 1; \
	done
	@$(CXX) -std=c++17 -Wall -Wextra -Wpedantic -Wshadow -Werror $(CORE_INCLUDE) $< $(CORE_LIB) -o $@

CORE_PROGRAMS := $(CORE_BUILD)/headers \
	$(CORE_TESTS:%=$(CORE_BUILD)/plain/bin/%) $(CORE_BUILD)/count/bin/test_large \
	$(CORE_TESTS:%=$(CORE_BUILD)/asan/bin/%) $(FUZZ_TARGETS:%=$(CORE_BUILD)/asan/bin/%)

.PHONY: core core-programs test-core mutants ubsan tsan valgrind fuzz fuzz-long cov

core: $(CORE_LIB) ## build the C core as a static library (build/core/libzbpcore.a)

core-programs: $(CORE_LIB) $(CORE_PROGRAMS) $(CORE_BUILD)/asan/bin/planted

# Empty where LeakSanitizer cannot run (tools/arm).
CORE_PLANTED_LEAK ?= "!LeakSanitizer $(CORE_BUILD)/asan/bin/planted leak"

test-core: ## test the C core, plain and under AddressSanitizer and UBSan, and fuzz it briefly
	@$(MAKE) --no-print-directory -s -j$(JOBS) -f $(firstword $(MAKEFILE_LIST)) core-programs
	@sh tests/c/run.sh core \
		"!AddressSanitizer $(CORE_BUILD)/asan/bin/planted overrun" \
		$(CORE_PLANTED_LEAK) \
		"!overflow $(CORE_BUILD)/asan/bin/planted overflow" \
		$(filter-out %/fuzz_plan %/fuzz_weight_pass %/fuzz_record,$(CORE_PROGRAMS)) \
		"$(CORE_BUILD)/asan/bin/fuzz_plan 40000 1" \
		"$(CORE_BUILD)/asan/bin/fuzz_weight_pass 40000 1" \
		"$(CORE_BUILD)/asan/bin/fuzz_record 1000 1"

mutants: ## put known faults back into the C core, one at a time: the tests must find each
	@CC="$(CC)" sh tests/c/mutants.sh $(CORE_BUILD)/mutants 400000

# How many inputs each fuzz target gets in ubsan, and on each of four threads in tsan.
UBSAN_INPUTS ?= 20000
TSAN_INPUTS ?= 300

ubsan: $(CORE_TESTS:%=$(CORE_BUILD)/ubsan/bin/%) $(FUZZ_TARGETS:%=$(CORE_BUILD)/ubsan/bin/%) $(CORE_BUILD)/ubsan/bin/planted ## test the C core and the passes, optimised, under UBSan alone (UBSAN_INPUTS=20000)
	@sh tests/c/run.sh ubsan "!overflow $(CORE_BUILD)/ubsan/bin/planted overflow" \
		$(CORE_TESTS:%=$(CORE_BUILD)/ubsan/bin/%) \
		$(foreach target,$(filter-out fuzz_record,$(FUZZ_TARGETS)),"$(CORE_BUILD)/ubsan/bin/$(target) $(UBSAN_INPUTS) 5") \
		"$(CORE_BUILD)/ubsan/bin/fuzz_record $$(($(UBSAN_INPUTS) / 100)) 5"

CORE_TSAN := $(CORE_BUILD)/tsan/bin/test_book $(CORE_BUILD)/tsan/bin/test_pass $(CORE_BUILD)/tsan/bin/test_record $(FUZZ_TARGETS:%=$(CORE_BUILD)/tsan/bin/%)
# It wants the addresses where it knows them.
CORE_FIXED := $(shell setarch -R true 2>/dev/null && echo setarch -R)

tsan: $(CORE_TSAN) $(CORE_BUILD)/tsan/bin/planted ## run the C core and the passes on several threads under ThreadSanitizer (TSAN_INPUTS=300)
	@sh tests/c/run.sh tsan "!ThreadSanitizer:.data.race $(CORE_FIXED) $(CORE_BUILD)/tsan/bin/planted race" \
		"$(CORE_FIXED) $(CORE_BUILD)/tsan/bin/test_book" "$(CORE_FIXED) $(CORE_BUILD)/tsan/bin/test_pass" "$(CORE_FIXED) $(CORE_BUILD)/tsan/bin/test_record" \
		$(FUZZ_TARGETS:%="$(CORE_FIXED) $(CORE_BUILD)/tsan/bin/% $(TSAN_INPUTS) 1 4")

# What no input may break, asked a million times; minutes.
SOAK_INPUTS ?= 1000000

fuzz-long: $(CORE_BUILD)/asan/bin/fuzz_plan $(CORE_BUILD)/asan/bin/fuzz_weight_pass ## give the plan and the weight pass a million random inputs each, under AddressSanitizer and UBSan (SOAK_INPUTS=1000000)
	@sh tests/c/run.sh fuzz-long "$(CORE_BUILD)/asan/bin/fuzz_plan $(SOAK_INPUTS) 7" "$(CORE_BUILD)/asan/bin/fuzz_weight_pass $(SOAK_INPUTS) 7"

CORE_VALGRIND := valgrind -q --error-exitcode=99 --leak-check=full --errors-for-leak-kinds=all

valgrind: $(CORE_TESTS:%=$(CORE_BUILD)/plain/bin/%) $(CORE_BUILD)/plain/bin/fuzz_plan $(CORE_BUILD)/plain/bin/planted ## test the C core under Valgrind
	@command -v valgrind >/dev/null || { echo "valgrind is not installed (Debian: apt-get install valgrind)"; exit 1; }
	@sh tests/c/run.sh valgrind \
		"!Invalid.read $(CORE_VALGRIND) $(CORE_BUILD)/plain/bin/planted overrun" \
		"!definitely.lost $(CORE_VALGRIND) $(CORE_BUILD)/plain/bin/planted leak" \
		$(CORE_TESTS:%="$(CORE_VALGRIND) $(CORE_BUILD)/plain/bin/%") \
		"$(CORE_VALGRIND) $(CORE_BUILD)/plain/bin/fuzz_plan 2000 2"

fuzz: ## fuzz the C core with libFuzzer (needs clang; FUZZ_TARGET=fuzz_plan, fuzz_record or fuzz_weight_pass, FUZZ_SECONDS=60, FUZZ_CC=clang)
	@command -v $(FUZZ_CC) >/dev/null || { echo "libFuzzer needs clang (Debian: apt-get install clang; or FUZZ_CC=clang-14). With gcc: make test-core runs the same target on its own inputs."; exit 1; }
	@mkdir -p $(CORE_BUILD)/fuzz/corpus_$(FUZZ_TARGET)
	@$(FUZZ_CC) -std=c11 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize-recover=all \
		$(CORE_INCLUDE) tests/c/$(FUZZ_TARGET).c tests/c/model.c $(FUZZ_WITH_$(FUZZ_TARGET)) \
		$(CORE_SOURCES:%=csrc/%) -o $(CORE_BUILD)/fuzz/$(FUZZ_TARGET)
	$(CORE_BUILD)/fuzz/$(FUZZ_TARGET) -max_total_time=$(FUZZ_SECONDS) -max_len=2048 \
		-artifact_prefix=$(CORE_BUILD)/fuzz/ -print_final_stats=1 $(CORE_BUILD)/fuzz/corpus_$(FUZZ_TARGET)

COV_COUNTS = $(patsubst %.o,%.gcda,$(CORE_OBJECTS_cov) $(PASS_OBJECTS_cov))

# Which branches need not be taken, and why: tests/c/uncovered.txt.
cov: $(CORE_TESTS:%=$(CORE_BUILD)/cov/bin/%) $(FUZZ_TARGETS:%=$(CORE_BUILD)/cov/bin/%) ## branches of the C core and the passes that their tests take: at least 95 % (needs gcov)
	@rm -f $(CORE_BUILD)/cov/objects/*/*.gcda $(CORE_BUILD)/cov/objects/*/*/*.gcda $(CORE_BUILD)/cov/tests/*.gcda
	@sh tests/c/run.sh core $(CORE_TESTS:%=$(CORE_BUILD)/cov/bin/%) "$(CORE_BUILD)/cov/bin/fuzz_plan 2000 3" \
		"$(CORE_BUILD)/cov/bin/fuzz_weight_pass 20000 3" "$(CORE_BUILD)/cov/bin/fuzz_record 20 3"
	@GCOV="$(GCOV)" sh tests/c/run.sh "cov, sees what nobody has listed" "!NOT.LISTED $(PYTHON) tests/c/branches.py /dev/null $(COV_COUNTS)"
	@GCOV="$(GCOV)" $(PYTHON) tests/c/branches.py tests/c/uncovered.txt $(COV_COUNTS)

