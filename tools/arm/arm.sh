#!/usr/bin/env bash
# tools/arm/arm.sh: zbpipe on aarch64, in a Debian of that machine whose instructions qemu emulates on this one.
#
#   arm.sh setup          Debian, torch and pytest into build/arm; a second run goes on where the first one stopped
#   arm.sh build          copies this tree there and builds it
#   arm.sh test PART...   core, passes, release, policy, kernels, leaks, memory, zbv, doctor, or any path under tests/,
#                         each for MINUTES (25) at most: what was cut off is named. Without a PART: all, in this order
#   arm.sh wheel          a wheel into build/arm/dist, installed into a fresh folder there and imported
#   arm.sh run COMMAND    runs a command there, in the copy of the tree; arm.sh run bash: a shell
#   arm.sh clean          removes it all; refuses while something is mounted there
#
# It needs root, for chroot and mounts, and Debian's qemu-user-static, debootstrap and g++-12-aarch64-linux-gnu. It
# tells the kernel how to start aarch64 programs, by an entry of binfmt_misc with a name of its own, which clean removes.
# Mounts lie in a private mount namespace, processes in a PID namespace: both end with the command.
# ARM names another folder than build/arm, QEMU_CPU another processor than max,sve=off, which is quick and has bfloat16.
set -euo pipefail
cd "$(dirname "$0")/../.."

torch=2.13.0 # without_cuda knows the libraries that this one wants
place=$(realpath -m "${ARM:-build/arm}")
root=$place/root
packages=/usr/local/lib/python3.11/dist-packages
folder=$(cksum <<<"$place") # each has an entry of its own, since clean removes it
entry=/proc/sys/fs/binfmt_misc/zbpipe-aarch64-${folder%% *}
qemu=/usr/bin/qemu-aarch64-static

fail() {
    echo "arm.sh: $*" >&2
    exit 1
}

in_private() { # a bash script and its arguments, with binfmt_misc mounted; what it mounts and starts ends with it
    unshare --mount --propagation private --pid --fork --kill-child --mount-proc \
        bash -euc "mount -t binfmt_misc binfmt_misc /proc/sys/fs/binfmt_misc; $1" arm.sh "${@:2}"
}

inside() { # a command and its arguments, in the chroot
    # F: the kernel opens qemu now, so that the chroot needs no copy. The bytes are ELF's, for 64 bits and aarch64.
    # Newer kernels forget an entry with the last mount, so each command looks for it.
    # shellcheck disable=SC2016
    in_private '
        entry=$1 qemu=$2 root=$3 packages=$4
        shift 4
        [ -e "$entry" ] || printf ":%s:M::%s:%s:%s:F" "${entry##*/}" \
            "\\x7fELF\\x02\\x01\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x02\\x00\\xb7\\x00" \
            "\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\x00\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xff\\xfe\\xff\\xff\\xff" \
            "$qemu" >"${entry%/*}/register"
        mkdir -p "$root/zbpipe"
        mount -t proc proc "$root/proc"
        [ ! -e "$root/etc/cpuinfo" ] || mount --bind "$root/etc/cpuinfo" "$root/proc/cpuinfo"
        mount --rbind /dev "$root/dev"
        mount -t tmpfs tmpfs "$root/dev/shm"
        # Not as process 1, which no signal of its own ends.
        chroot "$root" env -i -C /zbpipe HOME=/root LANG=C.UTF-8 PATH="$packages/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
            QEMU_CPU="${QEMU_CPU:-max,sve=off,pauth-impdef=on}" PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore \
            OMP_NUM_THREADS=1 MAX_JOBS="${MAX_JOBS:-2}" ZBPIPE_WERROR=1 "$@"
        exit 0' "$entry" "$qemu" "$root" "$packages" "$@"
}

# torch looks there for the processor, and crashes on what is said of one that is no aarch64. So /sys is not mounted.
processor() {
    local cpu=$root/sys/devices/system/cpu number
    for number in 0 1; do
        printf '%s\t: %s\n' processor $number BogoMIPS 2000.00 \
            Features "fp asimd aes pmull sha1 sha2 crc32 atomics fphp asimdhp cpuid asimdrdm lrcpc dcpop asimddp bf16" \
            "CPU implementer" 0x41 "CPU architecture" 8 "CPU variant" 0x3 "CPU part" 0xd0c "CPU revision" 1
        echo
        mkdir -p "$cpu/cpu$number/regs/identification"
        echo 0x00000000413fd0c1 >"$cpu/cpu$number/regs/identification/midr_el1"
    done >"$root/etc/cpuinfo"
    echo 0-1 | tee "$cpu/possible" >"$cpu/present"
}

step() { # a function that is called once
    [ -e "$place/done/$1" ] && return
    echo "== $1"
    "$@"
    mkdir -p "$place/done"
    touch "$place/done/$1"
}

unpacked() {
    rm -rf --one-file-system "$root"
    debootstrap --arch=arm64 --foreign --variant=minbase --include=python3-dev,g++,make bookworm "$root" ||
        fail "debootstrap failed, see above"
}

configured() {
    inside /debootstrap/debootstrap --second-stage || fail "debootstrap's second stage failed: see $root/debootstrap"
    rm -rf "$root"/var/cache/apt/archives/*.deb
    echo "127.0.0.1 localhost $(uname -n)" >"$root/etc/hosts" # ranks look for each other by name
}

# The compilers proper become this machine's own for aarch64, of the same release: they run without emulation.
compilers() {
    local from=/usr/lib/gcc-cross/aarch64-linux-gnu/12 to=/usr/lib/gcc/aarch64-linux-gnu/12 file
    if [ ! -x $from/cc1plus ]; then
        echo "arm.sh: no $from/cc1plus (apt-get install g++-12-aarch64-linux-gnu): compilers run emulated, for an hour"
        return
    fi
    mkdir -p "$root/usr/aarch64-linux-gnu" "$root${from%/*}"
    ln -sfn $to "$root$from"
    ln -sfn /usr/include "$root/usr/aarch64-linux-gnu/include"
    ln -sfn /usr/include/aarch64-linux-gnu/c++/12 "$root/usr/include/c++/12/aarch64-linux-gnu"
    ldd $from/cc1 $from/cc1plus | grep -oE '/lib[^ ]+ ' | sort -u | while read -r file; do
        install -D "$file" "$root$file"
    done
    install $from/cc1 $from/cc1plus "$root$to/"
}

# pip of this machine fetches what is for the other, so nothing runs emulated.
for_arm() {
    # shellcheck disable=SC2046
    PIP_ROOT_USER_ACTION=ignore python3 -m pip install --quiet --upgrade --target "$root$packages" --no-compile \
        --only-binary=:all: --implementation cp --python-version 3.11 \
        $(printf -- '--platform manylinux_2_%s_aarch64 ' {5..39}) --platform manylinux2014_aarch64 "$@" ||
        fail "pip did not find all of: $*"
}

fetched() {
    for_arm --no-deps "torch==$torch"
    for_arm numpy filelock "typing-extensions>=4.10" "sympy>=1.13.3" networkx jinja2 fsspec "setuptools>=77.0.3" pip \
        ninja "pytest>=8" "pytest-xdist>=3.7" hypothesis matplotlib
}

# torch for aarch64 is a build for CUDA, whose libraries take 4 GB. On a CPU nothing calls them, but the loader wants
# each. Here are the small ones; one library, whose functions end the process, stands for all others.
without_cuda() {
    for_arm --no-deps "nvidia-cuda-runtime==13.0.*" "nvidia-cuda-cupti==13.0.*" nvidia-cufile
    # shellcheck disable=SC2016
    inside bash -euc '
        cd "$1/torch/lib"
        wanted="\<(cublas|cudnn|cufft|curand|cusolver|cusparse|nccl|nvrtc|nvshmem)\w*(@\S+)?"
        nm --dynamic --undefined-only ./*.so | grep -oE "$wanted" | sort -u | awk -F@ "
            { print \"void \" \$1 \"(void) { __builtin_trap(); }\" >\"no_cuda.c\" }
            \$2 { names[\$2] = names[\$2] \$1 \";\" }
            END { for (version in names) print version, \"{\", names[version], \"};\" >\"no_cuda.map\" }"
        gcc -shared -fPIC -w -Wl,--version-script=no_cuda.map no_cuda.c -o libno_cuda.so
        for name in lib{cublas,cublasLt,nvrtc}.so.13 lib{cufft,cusparse,cusolver}.so.12 libcurand.so.10 \
            libcusparseLt.so.0 libcudnn.so.9 libnccl.so.2 libnvshmem_host.so.3; do
            ln -sf libno_cuda.so "$name"
        done
        python3 -c "import torch; print(\"torch\", torch.__version__, torch.ones(2) @ torch.ones(2))"' - "$packages" ||
        fail "torch cannot be imported there, see above: does it want another library of CUDA? (without_cuda)"
}

setup_arm() {
    if [ ! -x "$qemu" ] || ! command -v debootstrap >/dev/null; then
        fail "$qemu or debootstrap is missing: apt-get install qemu-user-static debootstrap"
    fi
    mkdir -p "$place"
    for name in unpacked configured processor compilers fetched without_cuda; do
        step "$name"
    done
}

# Files keep their times, so that only what changed is compiled again; what is no longer in the tree goes.
copied() {
    local tree=$root/zbpipe list=$place/list
    mkdir -p "$tree"
    [ -e "$list" ] && (cd "$tree" && xargs -0 rm -f <"$list")
    git ls-files -z --cached --others --exclude-standard --deduplicate | while IFS= read -r -d "" file; do
        [ -e "$file" ] && printf '%s\0' "$file"
    done >"$list" || true
    tar --create --null --files-from "$list" | tar --extract --no-same-owner --directory "$tree"
}

build_arm() {
    copied
    inside python3 setup.py --quiet build_ext --inplace
    inside python3 -m pip install --quiet --no-build-isolation --no-deps --force-reinstall --editable .
}

tested() { # a part
    local minutes=${MINUTES:-25}
    echo "== $1"
    case $1 in
    # LeakSanitizer stops the program by ptrace, which qemu has not.
    core) inside env ASAN_OPTIONS=detect_leaks=0 timeout "${minutes}m" make -s -f tests/core.mk test-core JOBS=1 \
        CORE_PLANTED_LEAK= ;;
    zbv) inside timeout "${minutes}m" python3 -m torch.distributed.run --nproc-per-node 2 examples/zbv.py ;;
    doctor) inside timeout "${minutes}m" python3 -m zbpipe doctor ;;
    # As make test runs them. What hangs is ended ten minutes after the time is up.
    *) inside timeout "$((minutes + 10))m" env -C tests MINUTES="$minutes" PYTHONPATH=../tools/arm python3 -m pytest \
        -c ../pyproject.toml --rootdir .. -p within -p no:cacheprovider -o faulthandler_timeout=1500 --durations 10 \
        -m "not long and not system" "$1" ;;
    esac
}

test_arm() {
    local failed=()
    [ $# -gt 0 ] || set -- core passes release policy kernels leaks memory zbv doctor
    copied
    for part in "$@"; do
        tested "$part" || failed+=("$part")
    done
    [ ${#failed[@]} = 0 ] || fail "not all passed, or time was up, in: ${failed[*]}"
}

wheel_arm() {
    copied
    # Debian 12's C library is 2.36.
    inside env ZBPIPE_PACK=1 python3 setup.py --quiet bdist_wheel --plat-name manylinux_2_36_aarch64
    inside bash -euc 'rm -rf /tmp/fresh; python3 -m pip install --quiet --no-deps --target /tmp/fresh dist/*aarch64.whl
        cd /tmp/fresh; python3 -c "import zbpipe; print(zbpipe.__file__, zbpipe._build)"'
    mkdir -p "$place/dist"
    cp "$root"/zbpipe/dist/*aarch64.whl "$place/dist/"
    ls "$place"/dist/*.whl
}

run_arm() {
    inside "$@"
}

clean_arm() {
    if grep -qs " $root/" /proc/[0-9]*/mountinfo; then
        fail "something is mounted under $root (grep it in /proc/*/mountinfo): end the command that runs there first"
    fi
    # shellcheck disable=SC2016
    in_private '[ ! -e "$1" ] || echo -1 >"$1"' "$entry"
    rm -rf --one-file-system "$place"
}

command=${1:-}
shift || true
case $command in
setup | build | test | wheel | run | clean) ;;
*)
    sed -n '2,/^set /{/^#/s/^# \?//p}' tools/arm/arm.sh
    exit 2
    ;;
esac
[ "$(id -u)" = 0 ] || fail "chroot and mounts need root: run it as root"
case $command in
setup | clean) ;;
*) [ -e "$place/done/without_cuda" ] || fail "$place is not set up: run tools/arm/arm.sh setup first" ;;
esac
"${command}_arm" "$@"
