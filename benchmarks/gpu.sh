#!/usr/bin/env bash
# All that needs a GPU: the tests marked gpu, then the benchmarks, in 9 minutes at most.
#
#     benchmarks/gpu.sh          on one GPU
#     benchmarks/gpu.sh cpu      tries this script without one: small sizes, no test marked gpu
#
# PYTHON (default: python3) is used as it is, with its torch, pytest, pytest-timeout, pytest-xdist,
# hypothesis and tabulate; nothing is installed, and no network is needed. The output ends in a table.
# It goes to gpu.md, what was written to stderr to gpu.log, and the profiles and plans of the race to
# race.tar.gz, in OUT (default: benchmarks/results).
set -uo pipefail

device=${1:-cuda}
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$root/benchmarks/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
: >"$out/gpu.log"

# graphshard.passes is the folder passes/, which only an installation maps. A copy needs none.
mkdir "$work/tree"
cp -r "$root"/{graphshard,benchmarks,tests,pyproject.toml} "$work/tree"
cp -r "$root/passes" "$work/tree/graphshard/passes"
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
cd "$work/tree" || exit 1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset TRITON_CACHE_DIR

rows=()
failed=0
due=$SECONDS # when the part that runs has to be done

# part NAME SECONDS COMMAND...: runs it within a time limit; its last line becomes its result. What a
# part leaves of its time is there for the next ones, and none can take theirs.
part() {
    local name=$1 limit start=$SECONDS status result
    due=$((due + $2)) limit=$((due - start))
    shift 2
    printf '\n## %s\n\n' "$name"
    timeout --kill-after=5 "$limit" "$@" >"$work/stdout" 2>"$work/stderr"
    status=$?
    printf '%s' "${fence:+$fence$'\n'}"
    cat "$work/stdout"
    printf '%s' "${fence:+$fence$'\n'}"
    { printf '== %s\n' "$name" && cat "$work/stderr"; } >>"$out/gpu.log"
    result=$(grep -v '^[[:space:]]*$' "$work/stdout" | tail -n 1 | sed 's/^=* *//; s/ *=*$//')
    if ((status)); then
        failed=1
        if ((status == 124 || status == 137)); then
            result="TIMED OUT after $limit s"
        else
            result="FAILED (exit status $status): $result"
        fi
        [[ -s $work/stderr ]] && printf '\n```\n%s\n```\n' "$(tail -n 30 "$work/stderr")"
    fi
    rows+=("| $name | ${result//|/ } | $((SECONDS - start)) |")
}

# tests SECONDS OPTION...: tests of tests/gpu as a part, named as they pass, so that a time limit
# does not hide them.
tests() {
    local seconds=$1
    shift
    fence='```' part tests "$seconds" "$python" -m pytest -v -p no:cacheprovider --tb=short \
        --disable-warnings --durations=5 "$@"
}

run_all() {
    printf '# GPU run\n\n`benchmarks/gpu.sh%s`, commit %s, %s\n' "${1:+ $1}" "$commit" "$(date -u +%F)"
    "$python" - "$device" <<'EOF' || return 1
import sys, torch
name = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
nccl = ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "none"
print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, NCCL {nccl}, {name}")
sys.exit(sys.argv[1] == "cuda" and not torch.cuda.is_available())
EOF
    # In the order of what they teach: if tests fail, nothing else is worth the time. Files of tests
    # run side by side, since none measures time. The limits on a GPU add up to 540 seconds.
    local small=(--layers 2) flat=() race=()
    if [[ $device == cpu ]]; then
        small=(--layers 1 --steps 3) flat=(--layers 1 --dim 64)
        race=(--layers 1 --dim 64 --hidden 128 --vocab 256 --tokens 64)
        tests 260 tests/gpu/test_training.py
    else
        tests 280 tests/gpu -m gpu -n 3 --dist loadfile --timeout 90
    fi
    # Four processes fit on a GPU of 80 GB.
    part race 95 "$python" -m benchmarks.race --device "$device" --out "$out" "${race[@]}" \
        --ways 'FSDP2, compiled blocks' graphshard
    # The row of torchao's fp8 is there if this Python has torchao.
    part 'race, fp8 and unsharded' 90 "$python" -m benchmarks.race --device "$device" "${race[@]}" \
        --links 0.03,370 --ways 'FSDP2, torchao float8' 'graphshard, fp8' torch.compile
    part 'offload streams' 35 "$python" -m benchmarks.offload_streams --device "$device" "${flat[@]}"
    part overhead 40 "$python" -m benchmarks.overhead --device "$device" "${small[@]}"
    printf '\n## Summary\n\n| part | result | seconds |\n|---|---|---:|\n'
    printf '%s\n' "${rows[@]}"
    return "$failed"
}

run_all "$@" | tee "$out/gpu.md"
exit "${PIPESTATUS[0]}"
