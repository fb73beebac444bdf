#!/usr/bin/env bash
# Runs a few small tests of each kernel under compute-sanitizer's memcheck, files side by side, each with a time limit of
# SECONDS_EACH. Prints a line for each; fails if an access was wrong, a test failed, or the time ran out.
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python}
SANITIZER=${SANITIZER:-$(command -v compute-sanitizer || echo /usr/local/cuda/bin/compute-sanitizer)}
LOGS=${LOGS:-$(mktemp -d)}
check() {
    local name=$1 file=$2 which=$3
    timeout "${SECONDS_EACH:-600}" "$SANITIZER" --tool memcheck --error-exitcode 9 --print-limit 5 \
        "$PYTHON" -m pytest -q -p no:cacheprovider -m gpu "$file" -k "$which" > "$LOGS/$name.log" 2>&1
    local code=$?
    echo "$name: exit $code; $(grep -h 'ERROR SUMMARY' "$LOGS/$name.log" | tail -1); $(grep -hE '[0-9]+ (passed|failed)' "$LOGS/$name.log" | tail -1)"
    return $code
}
pids=()
run() { check "$@" & pids+=($!); }
run prefill-hopper tests/kernels/test_hopper.py "plain_attention and uneven and (dtype3 or dtype0) and not softcap"
run prefill-plan tests/kernels/test_prefill_plan.py "uneven or 128"
run prefill-portable tests/unit/ops/test_attention.py "mixed_step or padding_rows"
run decode tests/kernels/test_decode.py "few_queries or pass_of_its_own"
run deterministic tests/unit/ops/test_deterministic_ops.py "test"
run linear tests/kernels/test_linear.py "fits_every_number or gated_product or (ring and (33 or 200))"
run experts tests/kernels/test_moe.py "mixture_is_that or sorted_by_expert or largest_logits"
run sampling tests/kernels/test_sampling.py "without_a_token or another_s or ties_beyond or reported or token_lists"
run step tests/kernels/test_step.py "test"
run norms tests/unit/ops/test_norms.py "test"
run story tests/kernels/test_story.py "agree and 150"
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
exit $failed
