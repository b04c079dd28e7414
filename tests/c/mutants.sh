#!/bin/sh
# Puts faults into the passes and the recordings, one at a time, and lets the fuzzer
# of each, or the tests of I's split, look: each must be found.
# usage: mutants.sh BUILD_DIR [INPUTS]. CC can be set. From the root of the tree.
build=$1 inputs=${2:-200000} found=0 missed=0
mkdir -p "$build"

# mutant NAME FILE SED_EXPRESSION: of W.
mutant() {
    look "$1" "$2" "$3" fuzz_weight_pass "tests/c/fuzz_weight_pass.c tests/c/fuzz_main.c tests/c/model.c tests/c/fake_shim.c" \
        csrc/pass/weight_pass.c "$inputs 1"
}

# Likewise: of how I is split.
mutant_of_split() {
    look "$1" "$2" "$3" "failed: " "tests/c/test_split.c tests/c/model.c" "" ""
}

# Likewise: of the plan.
mutant_of_plan() {
    look "$1" core/graph/zbp_plan.c "$2" "failed: " "tests/c/test_plan.c tests/c/model.c" "" ""
}

# Likewise: of what recordings are fed from, by the fuzzer of it.
mutant_of_record() {
    look "$1" instruments/core/zbp_record.c "$2" "fuzz_record: " "tests/c/fuzz_record.c tests/c/fuzz_main.c tests/c/model.c" "" "300 1"
}

# Where a source's object lies.
object_of() {
    echo "$build/$(echo "$1" | tr / _).o"
}

compile() {
    ${CC:-cc} -std=c11 -O1 -Icsrc -Itests/c -c "$1" -o "$2"
}

# What no fault is put into is compiled once.
for source in csrc/core/*/*.c csrc/instruments/core/*.c csrc/pass/*.c tests/c/model.c tests/c/counting.c tests/c/fake_shim.c tests/c/test_plan.c tests/c/test_split.c \
    tests/c/fuzz_weight_pass.c tests/c/fuzz_record.c tests/c/fuzz_main.c; do
    compile "$source" "$(object_of "$source")" || exit 1
done

# look NAME FILE SED_EXPRESSION WHAT_IT_SAYS TESTS SOURCES ARGUMENTS
look() {
    sed "$3" "csrc/$2" >"$build/mutant.c"
    if cmp -s "csrc/$2" "$build/mutant.c"; then
        echo "the mutant '$1' changes nothing: mend its pattern" >&2
        exit 1
    fi
    compile "$build/mutant.c" "$(object_of "mutant.c")" || exit 1
    objects=
    for source in $5 $6 tests/c/counting.c csrc/core/*/*.c csrc/instruments/core/*.c; do
        [ "$source" = "csrc/$2" ] && source=mutant.c
        objects="$objects $(object_of "$source")"
    done
    # shellcheck disable=SC2086 # words
    ${CC:-cc} -Wl,--wrap=zbpi_resize,--wrap=zbpi_free $objects -pthread -o "$build/mutant" || exit 1
    # shellcheck disable=SC2086
    if said=$(ulimit -c 0; ulimit -v 1000000; ulimit -t 30; "$build/mutant" $7 2>&1); then
        missed=$((missed + 1))
        echo "MISSED: $1"
    else
        found=$((found + 1))
        echo "found: $1 ($(echo "$said" | grep -m1 "$4"))"
    fi
}

book=core/pass/zbp_book.c pass=pass/weight_pass.c
# Who is alone.
mutant "a weight with a hook is alone" $book 's/(ZBP_WEIGHT_HOOKED | ZBP_WEIGHT_ELSEWHERE)/ZBP_WEIGHT_ELSEWHERE/'
mutant "a weight that adds on another stream is alone" $book 's/(ZBP_WEIGHT_HOOKED | ZBP_WEIGHT_ELSEWHERE)/ZBP_WEIGHT_HOOKED/'
mutant "of several faces the last one is alone" $book 's/is_first && is_at_hand/is_at_hand/'
mutant "what a node computes is at hand" $book '/^static bool is_at_hand/,/^}/s/return false;/return true;/'
mutant "what a Function has handed over is at hand" $book 's/return !task->has_work;/return true;/'
mutant "what lies behind hooks is at hand" $book 's/return !task->leaves_packed;/return true;/'
mutant "a weight behind a node is alone" $book 's/if (layout->hop\[h\].to_weight >= 0)/if (false)/'
mutant "what waits is alone" $book 's/weight->is_added || weight->has_arrived ||/weight->is_added ||/'
mutant "what was added is alone" $book 's/weight->is_added || weight->has_arrived ||/weight->has_arrived ||/'
mutant "anomaly mode is not told" $book 's/if (how.is_anomaly || /if (/'
mutant "each group says by itself which weights are the engine \
    's" $pass 's/count > 1 ? share_engine/false ? share_engine/'
mutant "the first group says for all which weights are the engine's" $pass \
    '/^static int share_engine/,/^}/s/g < count; g++) {/g < 1; g++) {/'
mutant "the first group does not ask which weights are the engine's" $pass \
    's/for (size_t g = 0; g < count && status == ZBP_OK && engine.count/for (size_t g = 1; g < count \&\& engine.count/'
# What is alone.
mutant "a frozen weight is added to" $pass 's/(book->weight\[w\].seen & ZBP_WEIGHT_FROZEN) == 0/true/'
mutant "what is added alone is not noted" $pass 's/group->book.weight\[w\].is_added = true;/;/'
mutant "a complete group holds on while others run" $pass 's/!how.retain && zbp_book_is_complete(book))/false)/'
mutant "a complete group lets go of what is to run again" $pass \
    's/!how.retain && zbp_book_is_complete(book))/zbp_book_is_complete(book))/'
# What the engine runs.
mutant "the engine passes over the steps of a path" $book 's/zbp_layout_give_up_path(layout, f);/(void)layout;/'
mutant "groups of one run share a weight" $pass \
    '/^static bool has_one_of/,/^}/s/zbp_map_find(weights, zbp_weight_key(group, w), NULL);/false;/'
mutant "a group that begins the next run is left out" $pass 's/first = g;/first = g + 1;/'
mutant "runs come in another order than their groups" $pass \
    '/^static int run_engine/,/^}/s/group\[g\]/group[count - 1 - g]/g'
mutant "what a run raised is not raised" $pass \
    's/status = zbp_run_engine(group + first, g - first/(void)!zbp_run_engine(group + first, g - first/'
mutant "a weight that was added is wanted again" $book 's/return !book->weight\[weight\].is_added && /return /'
mutant "a gradient that waits is computed again" $book 's/ && !book->weight\[weight\].has_arrived;/;/'
mutant "the last weight lets go of what is to run again" $book 's/goes_with_last = !retain;/goes_with_last = true;/'
# What becomes of groups.
mutant "two weight passes have one group" $book 's/return __atomic_exchange_n.*/book->claimed = 1; return true;/'
mutant "what leads to no owed weight runs again" $book 's/leads\[o\] = false;/leads[o] = true;/'
mutant "a retried group is to run again" $book 's/ && !book->has_failed) {/) {/'
mutant "a call that failed is forgotten" $book '/^zbp_fate zbp_book_settle/,/^}/s/book->has_failed = true;/;/'
mutant "a call that was to retain and failed cannot be repeated" $book \
    '/^zbp_fate zbp_book_settle/,/^}/s/if (how.retain)$/if (false)/'
mutant "tasks go that are still to run" $book \
    '/^zbp_fate zbp_book_settle/,/^}/s/if (zbp_book_wants(book, w))/if (false)/'
mutant "tasks stay that have run" $book '/^zbp_fate zbp_book_settle/,/^}/s/if (zbp_book_wants(book, w))/if (true)/'
mutant "a group that is to run again has been added" $book \
    '/^zbp_fate zbp_book_settle/,/^}/s/is_added = false/is_added = true/'
# Of I.
split=core/pass/zbp_split.c
mutant_of_split "an edge to an input leads to the node behind it" $split \
    's/return ZBP_TO_CAPTURE;/return ZBP_TO_NODE;/'
mutant_of_split "a node that W runs again computes its weights' gradients in I too" $split \
    's/edit.to == ZBP_TO_NOWHERE \&\& task->kind != ZBP_TASK_WHOLE/false/'
mutant_of_split "an edge that leaves the closure stays as it is" $split \
    's/is_of_node = edit.to != ZBP_TO_NODE/& \&\& edit.to != ZBP_TO_NOWHERE/'
mutant_of_split "a path passes a node where gradients meet" $split \
    's/} else if (adds_up) {/} else if (false) {/'
mutant_of_split "a path passes a node that is watched" $split \
    's/(fact->flag \& ZBP_FACT_WATCHED) == 0/true/'
mutant_of_split "a weight is cast twice" $split 's/} else if (casts > 1) {/} else if (false) {/'
mutant_of_split "an output on weights alone is forgotten" $split \
    's/!has(w, root\[r\], ZBP_NODE_WEIGHT_ROOT)/true/'
mutant_of_split "a weight that is a matrix is taken for a vector" $split \
    's/is_left ? ZBP_FACT_LEFT_MATRIX : ZBP_FACT_RIGHT_MATRIX/0/'
mutant_of_split "what is left to I by name goes to W" $split 's/is_excluded = is_excluded || .*/;/'
mutant_of_split "what leads to a weight that is left to I goes to W" core/graph/zbp_plan.c \
    's/flag_reached(w, flag, except);/if (flag == ZBP_NODE_EXCLUDED) w->stack_count = 0; else &/'
mutant_of_plan "what computes a weight that is left to I goes to W" \
    's/flag\[i\] = ZBP_NODE_CLOSURE;/flag[i] \&= (uint8_t)~COMPUTES;/'
mutant_of_plan "I runs what an output reaches by W alone" \
    's/computes_excluded(w, i) \&\& (w->flag\[i\] \& ROOTED) == 0/computes_excluded(w, i)/'
# Of recordings.
mutant_of_record "a block that was taken back unseen stays live" 's/if (old.address != 0)/if (false)/'
mutant_of_record "a record that has ended is fed on" 's/if (\*place != NULL)$/if (false)/'
mutant_of_record "the end of any record is the end of all" 's/(place, record->next, /(place, NULL, /'
mutant_of_record "a block without room in the table uses up a serial" 's/next_serial += is_followed/next_serial += 1/'
mutant_of_record "the first record alone is told" \
    '/^static void tell_all_freed/,/^}/s/record != NULL; record = record->next/record != NULL; record = NULL/'
mutant_of_record "what a record does not own counts as its own" 's/if (block.serial < record->first_serial)/if (false)/'
mutant_of_record "a log goes on after what it has dropped" \
    's/if (record->dropped != 0 || record->event_count == /if (record->event_count == /; s/if (record->dropped == 0 \&\& /if (/'
echo "mutants: $found passed, $missed failed"
[ "$missed" = 0 ]
