#!/bin/sh
# Puts faults into the passes, the ledger of recordings and the search for holders, one at a time, and lets the fuzzer
# of each, or the tests of I's split, look: each must be found.
# usage: mutants.sh BUILD_DIR [INPUTS]. CC can be set. From the root of the tree.
build=$1 inputs=${2:-200000} found=0 missed=0
mkdir -p "$build"

# mutant NAME FILE SED_EXPRESSION: of W.
mutant() {
    look "$1" "$2" "$3" fuzz_weight_pass "tests/c/fuzz_weight_pass.c tests/c/fake_shim.c" \
        "csrc/pass/weight_pass.c csrc/pass/direct.c csrc/pass/sweep.c" "$inputs 1"
}

# Likewise: of how I is split.
mutant_of_split() {
    look "$1" "$2" "$3" "failed: " "tests/c/test_split.c tests/c/model.c" "" ""
}

# Likewise: of which gradients I sums.
mutant_of_folds() {
    look "$1" core/pass/zbp_folds.c "$2" "failed: " "tests/c/test_folds.c tests/c/model.c" "" ""
}

# Likewise: of the ledger that recordings are fed from.
mutant_of_ledger() {
    look "$1" core/memory/zbp_ledger.c "$2" "fuzz_ledger: " "tests/c/fuzz_ledger.c tests/c/model.c" "" "300 1"
}

# Likewise: of the tally that threads feed.
mutant_of_tally() {
    look "$1" core/memory/zbp_tally.c "$2" "failed: " "tests/c/test_tally.c tests/c/model.c" "" ""
}

# Likewise: of by which ways what lives is held.
mutant_of_ways() {
    look "$1" "core/holders/$2" "$3" "fuzz_ways\|Assertion" "tests/c/fuzz_ways.c tests/c/ways_model.c tests/c/model.c" "" "2000 1"
}

# Likewise: of what is explored, sought and let go of.
mutant_of_holders() {
    look "$1" "holders/$2" "$3" "failed: " "tests/c/test_holders.c tests/c/fake_things.c tests/c/model.c" \
        "csrc/holders/explore.c csrc/holders/going.c csrc/holders/search.c csrc/holders/storages.c" ""
}

# Where a source's object lies.
object_of() {
    echo "$build/$(echo "$1" | tr / _).o"
}

compile() {
    ${CC:-cc} -std=c11 -O1 -DZBP_FUZZ_STANDALONE -Icsrc -Itests/c -c "$1" -o "$2"
}

# What no fault is put into is compiled once.
for source in csrc/core/*/*.c csrc/pass/*.c csrc/holders/*.c tests/c/model.c tests/c/ways_model.c tests/c/fake_shim.c tests/c/test_split.c \
    tests/c/test_folds.c tests/c/test_tally.c tests/c/test_holders.c tests/c/fake_things.c \
    tests/c/fuzz_weight_pass.c tests/c/fuzz_ledger.c tests/c/fuzz_ways.c; do
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
    for source in $5 $6 csrc/core/*/*.c; do
        [ "$source" = "csrc/$2" ] && source=mutant.c
        objects="$objects $(object_of "$source")"
    done
    # shellcheck disable=SC2086 # words
    ${CC:-cc} $objects -o "$build/mutant" || exit 1
    # shellcheck disable=SC2086
    if said=$(ulimit -c 0; "$build/mutant" $7 2>&1); then
        missed=$((missed + 1))
        echo "MISSED: $1"
    else
        found=$((found + 1))
        echo "found: $1 ($(echo "$said" | grep -m1 "$4"))"
    fi
}

# Defects that there were.
mutant "a kept gradient goes before it is added" pass/direct.c \
    's/^    uint32_t added = 0;/&\n\n    zbp_let_go(adding, face);/'
mutant "a hook on the path of a half added product: all of it is added again" core/pass/zbp_book.c \
    '/path_is_hooked)$/,/give_up/s/if (is_half_added(&book->face\[f\]))/if (false)/;s/if (is_half_added(face) \&\& !(is_direct/if (is_half_added(face) \&\& layout->face[f].weight >= 0 \&\& !(is_direct/'
mutant "the rest of a product goes into another gradient" core/pass/zbp_book.c \
    's/ && face->sum_now == face->half.sum/ || face->sum_now != 0/'
mutant "two weight passes have one group" core/pass/zbp_book.c \
    's/return __atomic_exchange_n.*/book->claimed = 1; return true;/'
# Others of the kind.
mutant "a delivered face is owed again" core/pass/zbp_book.c \
    's/return !book->face\[face\].is_delivered && (weight->seen/return (weight->seen/'
mutant "a weight that was added is wanted again" core/pass/zbp_book.c \
    's/return !book->weight\[weight\].is_added && /return /'
mutant "a gradient that waits is computed again" core/pass/zbp_book.c \
    's/ && !book->weight\[weight\].has_arrived;/;/'
mutant "a retried group is to run again" core/pass/zbp_book.c 's/ && !book->has_failed) {/) {/'
mutant "what waits is released with the tasks" core/pass/zbp_book.c 's/is_computed = true;/is_computed = false;/;s/is_computed && !zbp_book_wants/is_computed || !zbp_book_wants/'
mutant "a weight with a hook is added to directly" core/pass/zbp_book.c \
    's/ || (book->weight\[w\].seen & ZBP_WEIGHT_HOOKED) != 0)/)/'
mutant "a sum is added with every face" core/pass/zbp_book.c \
    's/return --book->weight\[layout->face\[face\].weight\].meeting == 0;/return true;/'
mutant "faces that met are not delivered" core/pass/zbp_book.c \
    '/^void zbp_book_met/,/^}/s/is_delivered = true/is_delivered = false/'
mutant "a half added product joins a sum" core/pass/zbp_book.c \
    's/book->face\[f\].is_delivered || is_half_added(&book->face\[f\])/book->face[f].is_delivered/;s/!how.fuse && !is_half_added(&book->face\[face\])/!how.fuse/'
mutant "nobody looks again before a group runs" pass/weight_pass.c \
    '/^static int start/,/^}/s/int status = find_way.*/uint32_t face; int status = ZBP_OK; way = zbp_book_way(turn->book, turn->layout, how, \&face);/'
mutant "a complete group runs again in a retry" core/pass/zbp_book.c \
    's/^    if (book->state != ZBP_BOOK_OPEN)$/    if (false)/;/^zbp_fate zbp_book_settle/,/^}/s/book->state = ZBP_BOOK_UNREPORTED;/return ZBP_FATE_KEEP;/'
mutant "what is retained is added again after a call that raised when it was through" core/pass/zbp_book.c \
    '/^void zbp_book_report_again/,/^}/s/is_delivered = !/is_delivered = false \&\& !/'
# Of sweeps.
mutant "a product that was swept is added again" pass/sweep.c 's/^            zbp_book_delivered(.*/            ;/'
mutant "what a sweep has added before it failed is not noted" pass/sweep.c \
    's/i < added; i++)$/i < (status == ZBP_OK ? added : 0); i++)/'
mutant "a sweep goes on past a hook" pass/sweep.c 's/if (sweeps->view\[t\].way != ZBP_WAY_DIRECT)/if (false)/'
mutant "a sweep looks at no other group" pass/sweep.c 's/status = zbp_look(.*/status = ZBP_OK;/'
mutant "a sweep takes products of another stream" core/pass/zbp_book.c \
    's/task->kind == ZBP_TASK_PRODUCT \&\& task->stream == 0/task->kind == ZBP_TASK_PRODUCT/'
mutant "a group is counted by what it owed before" pass/sweep.c 's/^        zbp_book_count_owed(.*/        ;/'
# Of I.
split=core/pass/zbp_split.c
mutant_of_split "an edge to an input leads to the node behind it" $split \
    's/return ZBP_TO_CAPTURE;/return ZBP_TO_NODE;/'
mutant_of_split "a node that W runs again computes its weights' gradients in I too" $split \
    's/to == ZBP_TO_NOWHERE \&\& !is_whole/false/'
mutant_of_split "an edge that leaves the closure stays as it is" $split \
    's/} else if (to != ZBP_TO_NODE) {/} else if (to == ZBP_TO_CAPTURE) {/'
mutant_of_split "a path passes a node where gradients meet" $split \
    's/} else if (adds_up) {/} else if (false) {/'
mutant_of_split "a path passes a node that is watched" $split \
    's/(fact->flag \& ZBP_FACT_WATCHED) == 0/true/'
mutant_of_split "a weight is cast twice" $split 's/} else if (casts > 1) {/} else if (false) {/'
mutant_of_split "a move to another device is no cast" $split 's/ || step == ZBP_STEP_MOVE//'
mutant_of_split "an output on weights alone is forgotten" $split \
    's/!has(w, root\[r\], ZBP_NODE_WEIGHT_ROOT)/true/'
mutant_of_split "a weight that is a matrix is taken for a vector" $split \
    's/sides.has_matrix || w->facts->is_matrix.*/false;/'
# Of the sums in I.
mutant_of_folds "a gradient is summed before the one that an ordinary backward adds first" \
    's/(folds->flag\[sum\] & folds->flag\[due\] & HAS_COME) == 0/(folds->flag[due] \& HAS_COME) == 0/'
mutant_of_folds "a sum goes on behind a node that W runs" 's/ && leads_directly(layout, order\[t\])//'
mutant_of_folds "a sum goes on behind a face that is not added" 's/is_over\[w\] = 1;//'
mutant_of_folds "gradients of two streams are summed" \
    's/return a != b && .*/return a != b;/'
mutant_of_folds "a gradient that somebody else has is added to" 's/if (fate == ZBP_FOLD_ADDED)$/if (true)/'
# Of the ledger.
mutant_of_ledger "a block that was taken back unseen stays live" 's/if (old.address != 0)/if (false)/'
mutant_of_ledger "a record that has ended is fed on" 's/if (ledger->record\[r\] != record)/if (true)/'
mutant_of_ledger "a block without room in the table uses up a serial" \
    '/^int zbp_ledger_alloc/,/^}/s/return status;/{ ledger->next_serial++; return status; }/'
mutant_of_ledger "the first record alone is told" \
    '/^static void tell_freed/,/^}/s/r < ledger->record_count/r < (ledger->record_count != 0)/'
mutant_of_ledger "blocks come as the table has them" 's/if (count > 1)/if (count > 1000)/'
# Of tallies.
mutant_of_tally "a collection lists what another tally takes back" 's/running.of != tally ||/false ||/'
mutant_of_tally "what nobody wants to know is listed on" 's/running.watchers != __atomic_load_n.*))/false)/'
mutant_of_tally "a list that is short is handed out" 's/return is_short ? ZBP_ENOMEM : ZBP_OK;/return ZBP_OK;/'
mutant_of_tally "the end of any record is the end of all" 's/is_fed = tally->ledger.record_count != 0;/is_fed = false;/'
# Of the search for holders.
mutant_of_ways "what holds itself is in no cycle" zbp_ways.c 's/ || holds_itself(ways, v);/;/'
mutant_of_ways "a component is left open" zbp_ways.c '/index\[member\] = CLOSED;/d'
mutant_of_ways "every member of a cycle is to blame" zbp_ways.c 's/ \&\& blame\[i\] == least_blame\[c\]//'
mutant_of_ways "a vertex forgets the search for a cycle that met it" zbp_ways.c \
    '/i < met; i++)$/,/UNMET;/s/= UNMET/= 0/'
mutant_of_ways "what is met again is not held once more" zbp_heap.c 's/if (v != ZBP_NO_VERTEX \&\& parent/if (added \&\& parent/'
mutant_of_holders "what is dying is looked at" explore.c 's/|| !lives)/)/'
mutant_of_holders "what others hold goes, too" explore.c 's/ \&\& zbp_explore_unexplained(self, to, false, false) <= 0//'
mutant_of_holders "the collector's own reference is somebody's" search.c 's/counts.python -= listed/counts.python -= false/; s/v, blame\[v - reached\], is_target/v, false, is_target/'
mutant_of_holders "a block of another moment is sought" storages.c 's/ \&\& block.serial < until//'
mutant_of_holders "a storage that was there before is new" storages.c '/!zbp_map_find(&older->places/d'
mutant_of_holders "what the roots do not reach is not searched" search.c 's/if (is_all_found(search))/if (true)/'
mutant_of_holders "the first group alone holds" going.c 's/going->roots.item\[i\]/going->roots.item[0]/'
echo "mutants: $found passed, $missed failed"
[ "$missed" = 0 ]
