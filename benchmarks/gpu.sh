#!/usr/bin/env bash
# Run everything that needs a GPU, in 10 minutes at most: the tests marked gpu, then the benchmarks.
#
#     benchmarks/gpu.sh          on one GPU
#     benchmarks/gpu.sh cpu      try this script without a GPU: small sizes, no test marked gpu
#
# PYTHON (default: python3) must have torch, pytest, pytest-timeout, pytest-xdist, hypothesis and
# tabulate; the script installs nothing and needs no network. The output ends with a table. In OUT
# (default: benchmarks/results), gpu.md gets the output, gpu.log the parts' stderr, and race.tar.gz
# the profiles and plans of the race.
set -uo pipefail

device=${1:-cuda}
python=${PYTHON:-python3}
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
out=${OUT:-$root/benchmarks/results}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir -p "$out"
: >"$out/gpu.log"

# Only an installation maps graphshard.passes to the folder passes/, so run in a copy that has the
# folder in the right place.
mkdir "$work/tree"
cp -r "$root"/{graphshard,benchmarks,tests,pyproject.toml} "$work/tree"
cp -r "$root/passes" "$work/tree/graphshard/passes"
commit=$(git -C "$root" describe --always --dirty 2>/dev/null || echo unknown)
cd "$work/tree" || exit 1
export TORCHINDUCTOR_CACHE_DIR=$work/inductor PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1
unset TRITON_CACHE_DIR

rows=()
failed=0
due=$SECONDS # deadline of the current part

# part NAME SECONDS COMMAND...: run a command with a time limit; its last line becomes its result.
# A part may use time left over by earlier parts, but not the time of later parts.
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

# tests NAME SECONDS OPTION...: run tests as a part. -v prints each result at once, so results are
# not lost if the part times out.
tests() {
    local name=$1 seconds=$2
    shift 2
    fence='```' part "$name" "$seconds" "$python" -m pytest -v -p no:cacheprovider --tb=short \
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
    # Tests come first, because benchmarks of failing code are worthless. Test files run in
    # parallel, because none measures time. The limits on a GPU add up to 555 seconds.
    local small=(--layers 2) race=() split=tensor_parallelism
    if [[ $device == cpu ]]; then
        small=(--layers 1 --steps 3)
        race=(--layers 1 --dim 64 --hidden 128 --vocab 256 --tokens 64)
        tests tests 260 tests/gpu/test_training.py -k "not $split"
        tests '2 x 2 ranks' 60 tests/gpu/test_training.py -k "$split"
    else
        tests tests 280 tests/gpu -m gpu -k "not $split" -n 3 --dist loadfile --timeout 90
        tests '2 x 2 ranks' 50 tests/gpu/test_shared_gpu.py -k "$split"
    fi
    # The four processes (2 variants, 2 links) fit on an 80 GB GPU.
    part race 95 "$python" -m benchmarks.race --device "$device" --out "$out" "${race[@]}" \
        --variants 'FSDP2, compiled blocks' graphshard
    # If torchao is installed, the table has a row for its fp8.
    part 'race, fp8 and unsharded' 90 "$python" -m benchmarks.race --device "$device" "${race[@]}" \
        --links 0.03,370 --variants 'FSDP2, torchao float8' 'graphshard, fp8' torch.compile
    part overhead 40 "$python" -m benchmarks.overhead --device "$device" "${small[@]}"
    printf '\n## Summary\n\n| part | result | seconds |\n|---|---|---:|\n'
    printf '%s\n' "${rows[@]}"
    return "$failed"
}

run_all "$@" | tee "$out/gpu.md"
exit "${PIPESTATUS[0]}"
