#!/bin/sh
# Runs test commands, each one argument, and adds up the "N passed, M failed" lines that they end
# with. A command written "!WORD command" must fail and say WORD: a detector that sees its planted
# fault. Silent but for what fails; the last line is "NAME: N passed, M failed".
#
# usage: run.sh NAME COMMAND...
name=$1
shift
passed=0
failed=0
export ASAN_OPTIONS="detect_leaks=1:abort_on_error=0:exitcode=99:${ASAN_OPTIONS:-}"
export UBSAN_OPTIONS="print_stacktrace=1:${UBSAN_OPTIONS:-}"

for command; do
    case $command in
    !*)
        word=${command%% *}
        word=${word#!}
        command=${command#* }
        if output=$($command 2>&1); then
            echo "$command: succeeded, but should fail with $word" >&2
            failed=$((failed + 1))
        elif ! printf '%s\n' "$output" | grep -q "$word"; then
            printf '%s\n' "$output" "$command: failed, but says nothing of $word" >&2
            failed=$((failed + 1))
        else
            passed=$((passed + 1))
        fi
        ;;
    *)
        output=$($command 2>&1)
        code=$?
        line=$(printf '%s\n' "$output" | sed -n 's/^\([0-9][0-9]*\) passed, \([0-9][0-9]*\) failed$/\1 \2/p' |
            tail -n 1)
        p=${line% *}
        f=${line#* }
        if [ -z "$line" ] || { [ "$code" -ne 0 ] && [ "$f" -eq 0 ]; }; then
            p=${p:-0}
            f=1 # it died, or a sanitizer spoke after the last case
        fi
        if [ "$f" -ne 0 ]; then
            printf '%s\n' "$output" "$command: exit status $code" >&2
        fi
        passed=$((passed + p))
        failed=$((failed + f))
        ;;
    esac
done
echo "$name: $passed passed, $failed failed"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
