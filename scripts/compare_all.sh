#!/usr/bin/env bash
# `--compare` for every layout and option that affects the order of additions: TP 2 and 4, fp32 and
# bf16, with and without recomputation, gradient-accumulation fusion on and off. Prints one line
# each and fails unless all are identical. One hash in a line: the weights are also those of
# Megatron's unsplit GEMMs. Arguments are passed to every run. Takes 20 minutes.
set -u
here="$(dirname "${BASH_SOURCE[0]}")"
folder="$(mktemp -d)"
log="$folder/log"
trap 'rm -rf "$folder"' EXIT
failed=0
for tp in 2 4; do
    for dtype in --fp32 --bf16; do
        for recompute in --no-recompute --recompute; do
            for fusion in --gradient-accumulation-fusion --no-gradient-accumulation-fusion; do
                options=(--tensor-model-parallel-size "$tp" "$dtype" "$recompute" "$fusion")
                bash "$here/pretrain_llama_cpu.sh" --compare --train-iters 20 \
                    --output "$folder" "${options[@]}" "$@" > "$log" 2>&1 || failed=1
                verdict="$(grep '^identical:' "$log" || tail -n 3 "$log")"
                hashes="$(sed -n 's/^sha256 of all weights, .*: //p' "$log" | sort -u | wc -l)"
                fused="$(grep -c 'forward calls fused' "$log")"
                echo "${options[*]} | $fused layers fused | $verdict | hashes of weights: $hashes"
            done
        done
    done
done
exit "$failed"
