"""The branches of the C core and its conductors that their own tests never take.

usage: branches.py UNCOVERED GCDA...; from the root of the tree, after the tests have run. GCOV can be set.

Says each such branch as file:line, per file and in all how many branches were taken at least once (each condition has
two). Fails below LEAST, and if one lies in a function that UNCOVERED does not list, or if a function listed there has
none. A line of UNCOVERED: file, function, reason; # begins a comment.
"""

import json
import os
import re
import subprocess
import sys

LEAST = 95.0
OURS = re.compile(r"csrc/(core|pass|instruments/core)/.*\.c$")


def read_gcov(files):
    """Yield (file, line, function, counts of its branches) for each line of ours that has branches."""
    gcov = os.environ.get("GCOV", "gcov")
    said = subprocess.run([gcov, "-b", "-t", "-j", *files], check=True, stdout=subprocess.PIPE).stdout
    for document in said.splitlines():
        for file in json.loads(document)["files"]:
            for line in file["lines"] if OURS.match(file["file"]) else ():
                if line["branches"]:
                    counts = [branch["count"] for branch in line["branches"]]
                    yield file["file"], line["line_number"], line["function_name"], counts


def read_listed(path):
    """{(file, function): reason}."""
    with open(path, encoding="utf-8") as lines:
        rows = [line.strip().split(maxsplit=2) for line in lines if line.strip() and not line.startswith("#")]
    short = [" ".join(row) for row in rows if len(row) < 3]
    if short:
        sys.exit(f"{path}: no reason: {short[0]}")
    return {(file, function): reason for file, function, reason in rows}


def main(uncovered, *files):
    listed, missing, taken, total = read_listed(uncovered), {}, {}, {}
    for file, line, function, counts in read_gcov(files):
        total[file] = total.get(file, 0) + len(counts)
        taken[file] = taken.get(file, 0) + sum(count > 0 for count in counts)
        never = sum(count == 0 for count in counts)
        if never:
            missing.setdefault((file, function), []).append((line, never, len(counts)))
    if not total:
        sys.exit("no branch of csrc/core or csrc/pass: did the tests run?")
    for (file, function), places in sorted(missing.items()):
        for line, never, of in places:
            reason = listed.get((file, function), "NOT LISTED")
            print(f"never taken: {file}:{line} ({function}), {never} of {of}: {reason}")
    for file in sorted(total):
        print(f"{file:<34} {taken[file]:>4} of {total[file]:>4} branches taken")
    percent = 100.0 * sum(taken.values()) / sum(total.values())
    faults = [
        f"{file}, {function}: has a branch that is never taken, and is not in {uncovered}"
        for file, function in sorted(missing.keys() - listed.keys())
    ]
    faults += [
        f"{file}, {function}: is in {uncovered}, and all its branches are taken (or it is gone)"
        for file, function in sorted(listed.keys() - missing.keys())
    ]
    if percent < LEAST:
        faults.append(f"fewer than {LEAST:g} % of the branches are taken")
    for fault in faults:
        print(f"FAILED {fault}", file=sys.stderr)
    sys.stderr.flush()
    print(f"core and pass: {percent:.2f} % of {sum(total.values())} branches taken at least once", flush=True)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
