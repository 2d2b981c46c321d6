#!/bin/sh
# The program as a user calls it. Usage: program_test.sh GROUP PROGRAM DATA_FOLDER
# A check that fails prints what came; the script's exit status is the number of failures.
group=$1
program=$2
data=$3/minilm_attention.safetensors
folder=$(mktemp -d) || exit 99
trap 'rm -rf "$folder"' EXIT
failures=0

fail() {
  echo "FAILED: $1"
  sed 's/^/    /' "$folder/stdout" "$folder/stderr"
  failures=$((failures + 1))
}

# run STATUS ARGUMENT...: the program ends with this exit code. What it printed is in $folder/stdout and $folder/stderr.
run() {
  expected=$1
  shift
  called="$*"
  "$program" "$@" >"$folder/stdout" 2>"$folder/stderr" </dev/null
  status=$?
  [ "$status" -eq "$expected" ] || fail "exit code $status, expected $expected: $called"
}

# says TEXT, complains TEXT: standard output, or standard error, of the last run has this text.
says() { grep -qF -- "$1" "$folder/stdout" || fail "no '$1' on standard output: $called"; }
complains() { grep -qF -- "$1" "$folder/stderr" || fail "no '$1' on standard error: $called"; }

# true_that COMMAND...: anything else that must hold.
true_that() { "$@" || fail "not so: $*"; }

# safetensors FILE HEADER BYTES: a file with this header (shorter than 65536 bytes) and so many zero bytes of data.
safetensors() {
  length=${#2}
  {
    printf "\\$(printf %o $((length % 256)))\\$(printf %o $((length / 256)))\\0\\0\\0\\0\\0\\0"
    printf %s "$2"
    head -c "$3" /dev/zero
  } >"$1"
}

# one_token FILE DTYPE_OF_K SHAPE_OF_K: q, k and v of one token, one head and two channels; 4 bytes a channel.
one_token() {
  safetensors "$1" "{\"q\":{\"dtype\":\"F32\",\"shape\":[1,1,1,2],\"data_offsets\":[0,8]},\
\"k\":{\"dtype\":\"$2\",\"shape\":$3,\"data_offsets\":[8,16]},\"v\":{\"dtype\":\"F32\",\"shape\":[1,1,1,2],\"data_offsets\":[16,24]}}" 24
}

# small_demo FILE: everything that the demo reads, all zero: 64 tokens, one head of 2.
small_demo() {
  text={ end=0
  for name in q k v log_decay beta log_decay_scalar; do
    case $name in
      beta | log_decay_scalar) shape='[1,64,1]' bytes=256 ;;
      *) shape='[1,64,1,2]' bytes=512 ;;
    esac
    text="$text\"$name\":{\"dtype\":\"F32\",\"shape\":$shape,\"data_offsets\":[$end,$((end + bytes))]},"
    end=$((end + bytes))
  done
  safetensors "$1" "${text%,}}" $end
}

out=$folder/out.safetensors

test_help() {
  run 0 --help
  says "Exit codes"
  for command in run info demo verify call error-growth tune; do
    run 0 $command --help
    says "Examples:"
    says "delta-attention $command"
  done
  run 0 --version
  says "."
  run 1
  run 1 nonsense
  run 1 run
  run 1 run "$data" "$out"
  complains "--recurrence"
  run 1 run "$data" "$out" --recurrence rwkv
  complains "gated_delta_net"
  run 1 run "$data" "$out" --recurrence kda --threads -1
  run 1 run "$data" "$out" --recurrence kda --heads 0
  run 1 run "$data" "$out" --recurrence kda --scale large
}

test_info() {
  run 0 info
  says "Kernels"
  says "reference"
  says "S = (I - beta k k^T) Diag(a) S + beta k v^T"
  says "softmax_reference"
  run 0 info --json
  says '"kernels": ['
  says '"softmax_kernels": ['
  run 0 info --recurrence gated_delta_net --T 100 --H 4 --HV 8 --K 64 --V 48 --dtype f16
  says "q and k f16 [1,100,4,64], v f16 [1,100,8,48]"
  says "runs"
  run 0 info --dtype f64
  says "no: f64 operands run on the kernel 'reference' only"
  run 2 info --H 3 --HV 4
  complains "multiple of H"
  run 2 info --T 1000000000 --B 1000000000
  complains "too large"
  run 2 info --T 10 --device gpu
  complains "expected cpu, cuda or cuda:N"
}

test_run() {
  run 2 run "$data" "$out" --recurrence kda --kernel cpu_chunkwise --settings rows=8
  complains "the kernel 'cpu_chunkwise' has no settings"
  run 2 run "$data" "$out" --recurrence kda --settings rows=8
  complains "by name"
  run 0 run "$data" "$out" --recurrence kda --l2norm --final-state
  says "out f16 [1,1024,12,32], final_state f32 [1,12,32,32]"
  says "q k v log_decay beta"
  run 0 run "$data" "$folder/again" -r kda --l2norm --final-state --threads 1
  true_that cmp -s "$out" "$folder/again"
  # On a terminal the work goes in parts, to show progress. (Some containers can open no pseudo-terminal.)
  if script -qec true /dev/null >/dev/null 2>&1; then
    script -qec "'$program' run '$data' '$folder/parts' -r kda --l2norm --final-state" /dev/null >"$folder/stdout" 2>&1
    true_that cmp -s "$out" "$folder/parts"
  fi
  run 0 run "$data" "$folder/other" -r kda --l2norm --scale 1
  true_that test "$(head -c 4096 "$out" | cksum)" != "$(head -c 4096 "$folder/other" | cksum)"
  run 0 run "$data" "$out" -r gated_delta_net --l2norm --tensor log_decay=log_decay_scalar
  run 0 run "$data" "$out" -r delta_net --l2norm --tensor log_decay=
  run 0 run "$data" "$out" -r kda --l2norm --heads 3 --tensor beta=beta_d128 --check-values
  says "q f16 [1,1024,3,128]"
  run 0 run "$data" "$out" -r kda --l2norm --kernel reference --gate-space log2 --beta-space sigmoid
  says "reference on cpu"
  run 0 run "$data" "$out" -r normalized_linear --tensor log_decay= --final-state
  says "final_normalizer f32 [1,12,32]"
  safetensors "$folder/none" '{}' 0
  run 2 run "$folder/none" "$out" -r linear
  complains "q: expected a tensor [B,T,H,K], got none"
}

test_operands() {
  run 2 run "$data" "$out" -r gated_delta_net
  complains "$data: log_decay: expected shape [B,T,HV] (scalar gate) = [1,1024,12], got [1,1024,12,32]"
  complains "log_decay_scalar"
  run 2 run "$data" "$out" -r delta_net
  complains "log_decay: expected none (the recurrence has no gate)"
  complains "--tensor log_decay= none"
  run 2 run "$data" "$out" -r kda --tensor beta=missing
  complains "--tensor beta=missing: the file has no tensor of this name"
  run 2 run "$data" "$out" -r kda --tensor gate=beta
  complains "expected OPERAND=NAME"
  run 2 run "$data" "$out" -r kda --heads 5
  complains "--heads: q f16 [1,1024,12,32] cannot be read as 5 heads"
  run 2 run "$data" "$out" -r kda --gate-space softplus
  complains "a_log: expected a tensor [HV]"
  run 2 run "$data" "$out" -r kda --check-values --tensor log_decay=q
  complains "log_decay["
  run 2 run "$data" "$out" -r kda --tensor v=
  complains "v: expected a tensor [B,T,HV,V], got none"
  run 2 run "$data" "$out" -r kda --scale inf
  complains "scale: expected a finite number"
  run 3 run "$data" "$out" -r kda --kernel imaginary
  complains "kernel 'imaginary' is not in this build"
  true_that test ! -e "$out"
  one_token "$folder/sound" F32 '[1,1,1,2]'
  run 0 run "$folder/sound" "$out" -r delta_net
  one_token "$folder/bad" F32 '[1,1,2,1]'
  run 2 run "$folder/bad" "$out" -r delta_net
  complains "k: expected shape [B,T,H,K] = [1,1,1,2], got [1,1,2,1]"
  one_token "$folder/bad" I32 '[1,1,1,2]'
  run 2 run "$folder/bad" "$out" -r delta_net
  complains "k: expected dtype"
  one_token "$folder/bad" BF16 '[1,1,2,2]'
  run 2 run "$folder/bad" "$out" -r delta_net
  one_token "$folder/bad" I64 '[1]'
  run 2 run "$folder/bad" "$out" -r delta_net
  one_token "$folder/bad" U32 '[1,1,1,2]'
  run 2 run "$folder/bad" "$out" -r delta_net
  complains "expected F32, F16, BF16, F64, I32 or I64"
  one_token "$folder/bad" F32 '[1,1,1,1,2]'
  run 2 run "$folder/bad" "$out" -r delta_net
  complains "1 to 4 axes"
}

test_bad_files() {
  : >"$folder/empty"
  run 2 run "$folder/empty" "$out" -r kda
  complains "$folder/empty: 0 bytes are too few"
  head -c 1000000 "$data" >"$folder/truncated"
  run 2 run "$folder/truncated" "$out" -r kda
  complains "the file is truncated"
  head -c 500 "$data" >"$folder/short_header"
  run 2 run "$folder/short_header" "$out" -r kda
  complains "the header says it is 1280 bytes long"
  run 2 run "$0" "$out" -r kda
  complains "no safetensors file"
  safetensors "$folder/text" 'hello' 0
  run 2 run "$folder/text" "$out" -r kda
  complains "does not begin with"
  run 2 run "$folder" "$out" -r kda
  complains "not a regular file"
  run 2 demo --data "$folder/empty"
  one_token "$folder/sound" F32 '[1,1,1,2]'
  run 2 demo --data "$folder/sound"
  complains "the demo needs a tensor log_decay"
  true_that test ! -e "$out"
}

test_files() {
  run 4 run "$folder/nothing" "$out" -r kda
  complains "$folder/nothing: No such file or directory"
  run 4 run "$data" "$folder/no/such/folder" -r kda
  complains "No such file or directory"
  if [ -c /dev/full ]; then
    run 4 run "$data" /dev/full -r kda
    complains "/dev/full: No space left on device"
    true_that test -c /dev/full
    "$program" info >/dev/full 2>"$folder/stderr"
    true_that test $? -eq 4
    small_demo "$folder/small"
    run 4 demo --data "$folder/small" --device cpu --json /dev/full
    complains "/dev/full: No space left on device"
  fi
  # An old output survives a call that fails, and no temporary file stays.
  mkdir "$folder/outputs"
  echo old >"$folder/outputs/x"
  run 2 run "$data" "$folder/outputs/x" -r delta_net
  true_that test "$(cat "$folder/outputs/x")" = old
  true_that test "$(ls -A "$folder/outputs")" = x
  # A pipe is written directly.
  "$program" run "$data" /dev/stdout -r kda 2>"$folder/stderr" | head -c 200 >"$folder/stdout"
  says '"dtype":"F16"'
  # Input and output may be the same file.
  cp "$data" "$folder/same"
  run 0 run "$folder/same" "$folder/same" -r kda
  run 2 run "$folder/same" "$out" -r kda
  complains "q: expected a tensor"
}

test_device() {
  run 2 run "$data" "$out" -r kda --device tpu
  complains "expected cpu, cuda or cuda:N, got 'tpu'"
  run 3 run "$data" "$out" -r kda --device cuda:999
  true_that test ! -e "$out"
  if "$program" info | grep -q 'cuda:0'; then
    run 0 run "$data" "$out" -r kda --l2norm --final-state --device cuda
    says "on cuda:0"
  fi
  export CUDA_VISIBLE_DEVICES=  # hides every GPU
  run 3 run "$data" "$out" -r kda --device cuda
  run 3 info --T 10 --device cuda
  run 0 info
  says "none: "
}

test_demo() {
  run 0 demo --json "$folder/demo.json"
  says "12 heads of 32"
  says "3 heads of 128"
  says "How to read it"
  rows=0
  if "$program" info | grep -q 'cuda:0'; then rows=2; fi
  true_that test "$(grep -cE '^  softmax +[a-z_]+ +cuda:0 ' "$folder/stdout")" -eq $rows
  for text in '"error_f32_by_block"' '"state_norm_by_block"' '"recurrence": "gla"' '"kernel": "reference"' '"softmax": ['; do
    true_that grep -qF "$text" "$folder/demo.json"
  done
  true_that test "$(grep -c '"error": null' "$folder/demo.json")" -eq 0
  run 2 demo --device tpu
  small_demo "$folder/small"
  run 0 demo --data "$folder/small" --device cpu
  says "1 head of 2, 64 tokens"
  sed 's/1,64,1,2/1,32,2,2/' "$folder/small" >"$folder/wrong"
  run 2 demo --data "$folder/wrong"
  complains "$folder/wrong: v: expected V >= 1 and HV a multiple of H = 2, got [1,64,1,2]"
  # Two value heads of width 1: something for the recurrences, nothing for softmax attention.
  sed -e 's/\("v":{"dtype":"F32","shape":\[1,64,\)1,2/\12,1/' -e 's/F32\(","shape":\[1,64,\)1\]/F16\12]/g' \
    -e 's/\("log_decay":{"dtype":"F\)32\(","shape":\[1,64,\)1,2/\116\22,2/' "$folder/small" >"$folder/value_heads"
  run 0 demo --data "$folder/value_heads"
  says "1 head of 2, 64 tokens"
  true_that test "$(grep -cE '^  softmax +[a-z_]+ +cuda' "$folder/stdout")" -eq 0
}

test_error_growth() {
  run 0 error-growth --quick --csv "$folder/growth.csv" --json "$folder/growth.json"
  for text in seed additive retention delta_above_2 activations v4_on_chip_compensated cpu_chunkwise bf16; do says "$text"; done
  # 9 regimes, 3 types, 6 kernels, 4 lengths; outputs and states everywhere, normalisers in one regime.
  true_that test "$(grep -cE '^[a-z0-9_]+,(f32|f16|bf16),[a-z0-9_]+,[a-z0-9:]+,[0-9]+,[a-z]+(,[0-9.e+-]+){3}$' "$folder/growth.csv")" \
    -eq $((9 * 3 * 6 * 4 * 2 + 3 * 6 * 4))
  true_that test "$(wc -l <"$folder/growth.csv")" -eq $((9 * 3 * 6 * 4 * 2 + 3 * 6 * 4 + 1))
  if command -v python3 >/dev/null; then
    true_that python3 - "$folder/growth.json" <<'END'
import json, sys
results = json.load(open(sys.argv[1]))
assert results["context"]["seed"] and results["context"]["repeats"] == 1, results["context"]
assert len(results["regimes"]) == 9 and len(results["rows"]) == 9 * 3 * 6 * 4
assert all(0 < row[quantity]["relative"] < 1e-2 for row in results["rows"] for quantity in ("out", "state"))
fitted = [(fit["regime"], fit["dtype"], fit["kernel"], fit["quantity"], fit["metric"]) for fit in results["fits"]
          if fit["quantity"] != "normalizer"]  # a sum of few 16-bit keys is exact: nothing to fit
assert len(set(fitted)) == len(fitted) == 9 * 2 * 3 * 6 * 2, len(fitted)
assert all(fit[law]["residual"] >= 0 for fit in results["fits"] for law in ("power", "logarithm"))
END
  fi
  # The same seed gives the same numbers, whatever else is measured.
  run 0 error-growth --quick --seed 7 --regimes delta kda --csv "$folder/a.csv"
  says "seed 7"
  run 0 error-growth --quick --seed 7 --regimes delta --dtypes f32 --csv "$folder/b.csv"
  true_that test "$(grep -c ^delta,f32 "$folder/a.csv")" -eq 48
  grep -E '^(regime|delta,f32)' "$folder/a.csv" >"$folder/c.csv"
  true_that cmp -s "$folder/b.csv" "$folder/c.csv"
  run 0 error-growth --tokens-to 1000 --repeats 2 --dim 8 --heads 2 --regimes retention --device cpu
  says "T=512"
  run 1 error-growth --regimes nonsense
  complains "gdn_slow"
  run 1 error-growth --dtypes f64
  run 1 error-growth --tokens-to 100
  run 1 error-growth --repeats 0
  run 2 error-growth --quick --device tpu
  run 3 error-growth --quick --device cuda:999
  run 4 error-growth --quick --data "$folder/nothing"
  run 4 error-growth --quick --regimes delta --dtypes f32 --json "$folder/no/such/folder"
}

# The diagnostic kernels reach into the library, so a program that links the shared one has none.
has_diagnostics() { "$program" verify --help | grep -q -e '--diagnostic.*{.*cpu_without_decay'; }

test_verify() {
  run 0 verify --only correctness --seed 7 --json "$folder/good.json"
  says "seed 7"
  says "cpu_chunkwise"
  if command -v python3 >/dev/null; then
    true_that python3 - "$folder/good.json" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
checks = report["correctness"]["checks"]
assert report["passed"] and report["correctness"]["seed"] == 7 and checks and all(c["passed"] for c in checks)
assert {c["problem"].split()[1] for c in checks} == {"f32", "f16", "bf16"}
END
  fi
  if has_diagnostics; then verify_rejects_a_wrong_kernel; fi
  CUDA_VISIBLE_DEVICES=  # hides every GPU
  export CUDA_VISIBLE_DEVICES
  run 0 verify --only profile --kernel cpu_chunkwise --kernel cpu_sequential
  says "Profile: skipped"
  DELTA_ATTENTION_SCRIPTS_DIR=$folder
  export DELTA_ATTENTION_SCRIPTS_DIR
  (cd "$folder" && run 0 verify --only machine-code && says "Machine code: skipped: sass.py was not found" && exit $failures) ||
    failures=$((failures + 1))
  run 1 verify --only nonsense
  run 1 verify --diagnostic cpu_sequential
  run 3 verify --only correctness --kernel imaginary
  complains "imaginary"
  run 2 verify --only correctness --kernel cpu_chunkwise:tile=3
  complains "settings"
  run 4 verify --only profile --json "$folder/no/such/folder"
}

# The decay dropped: the verifier must see it wherever there is one, and only there.
verify_rejects_a_wrong_kernel() {
  run 6 verify --only correctness --kernel cpu_sequential --diagnostic cpu_without_decay --json "$folder/wrong.json"
  says "Does not hold"
  complains "verify: "
  if command -v python3 >/dev/null; then
    true_that python3 - "$folder/wrong.json" <<'END'
import json, sys
report = json.load(open(sys.argv[1]))
assert not report["passed"]
for check in report["correctness"]["checks"]:
    gated = check["problem"].split()[0] not in ("linear", "normalized_linear", "delta_net")
    assert check["passed"] == (check["kernel"] == "cpu_sequential" or not gated), check
END
  fi
}

test_tune() {
  # On the CPU no kernel has settings; the sweep itself is tested on an invented one.
  run 0 tune --device cpu --output "$folder/table"
  says "nothing to tune"
  says "it has no settings"
  true_that test ! -e "$folder/table"
  run 3 tune --device cpu --kernel cpu_chunkwise
  complains "'cpu_chunkwise' has no settings"
  run 3 tune --kernel imaginary
  complains "'imaginary' is not in this build"
  run 3 tune --device cuda:999
  run 2 tune --device tpu
  run 2 tune --device cpu --fix flush
  complains "NAME=INTEGER"
  run 2 tune --device cpu --fix flush=8
  complains "has the setting 'flush'"
  run 1 tune --recurrence rwkv
  run 1 tune --T 0
  run 1 tune --keep 0
}

test_call() {
  run 0 call --kernel cpu_chunkwise --recurrence kda --T 50 --H 1 --HV 2 --K 16 --V 24 --dtype bf16
  says "kda bf16 B:1 T:50 H:1 HV:2 K:16 V:24"
  if has_diagnostics; then
    run 0 call --kernel cpu_without_decay --T 50 --H 1 --repeat 1
    says "median of 1"
  fi
  run 3 call --kernel imaginary --T 50
  run 2 call --H 2 --HV 3 --T 50
  run 1 call --dtype f64
}

command -v "test_$group" >/dev/null || fail "no group '$group' in this script"
test_"$group"
exit $failures
