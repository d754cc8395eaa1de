#!/bin/sh
# The heads that ship for the embedded model: every setting they are trained with, in one place.
#
#   sh scripts/heads.sh train     train all four, over one data folder (make heads)
#   sh scripts/heads.sh install   copy what was trained into the package (make heads-install)
#   sh scripts/heads.sh keep      put the answers so far beside the source, for the next training
#
# What the target answered is kept in the repository (a megabyte and a half for a million tokens):
# answering takes longer than everything else, and the same answers give the same heads.
#
# Interrupted at any moment, the same command goes on where it was. A method that is done is passed
# over until this file changes.
set -eu

model=smollm2-135m-instruct
out=build/heads
assets=src/outrider/assets/heads/$model
methods="eagle3 mtp medusa draft"
kept=training_data/$model.answers.jsonl.gz
outrider=${OUTRIDER:-.venv/bin/outrider}

# What the target answers, shared by all: a changed setting needs a new data folder.
answers="--num-prompts 3900 --temperatures 0,1,0,1,0.7 --max-response-tokens 192 --seed 0"
# How every head trains: the command's defaults.
training="--epochs 3 --tokens-per-batch 2048 --learning-rate 1e-3 --loss ce"
# What each method has of its own.
eagle3="--steps 3 --draft-vocab 16384"
mtp="--steps 3"
medusa="--steps 4"
draft=""

train() {
    if [ -e "$kept" ] && [ ! -e "$out/data/responses-kept.jsonl" ]; then
        mkdir -p "$out/data"
        gzip -dc "$kept" > "$out/data/unpacked.tmp"
        mv "$out/data/unpacked.tmp" "$out/data/responses-kept.jsonl"
    fi
    for method in $methods; do
        run=$out/$method
        if [ -e "$run/done" ] && [ ! "$0" -nt "$run/done" ]; then
            echo "$method: done, in $run/head" >&2
            continue
        fi
        eval "own=\$$method"
        # shellcheck disable=SC2086,SC2154  # settings are lists of words; own is set by eval
        "$outrider" train "$method" --model "$model" --out "$run" --data "$out/data" \
            $answers $training $own
        : > "$run/done"
    done
}

install() {
    for method in $methods; do
        head=$out/$method/head
        if [ ! -e "$out/$method/done" ]; then
            echo "$method: not trained to its end in $out/$method; passed over" >&2
            continue
        fi
        mkdir -p "$assets"
        rm -rf "${assets:?}/$method"
        cp -R "$head" "$assets/$method"
        echo "$method: $(du -sk "$assets/$method" | cut -f1) KiB in $assets/$method" >&2
    done
}

keep() {
    mkdir -p "$(dirname "$kept")"
    # Whole lines only: an answer may just be being written.
    cat "$out"/data/responses*.jsonl | grep '}$' | gzip -9n > "$kept.tmp"
    mv "$kept.tmp" "$kept"
    echo "$(gzip -dc "$kept" | wc -l) answers in $kept, $(du -k "$kept" | cut -f1) KiB" >&2
}

case ${1:-} in
    train | install | keep) "$1" ;;
    *) echo "usage: sh scripts/heads.sh train|install|keep" >&2; exit 2 ;;
esac
