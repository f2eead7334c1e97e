#!/usr/bin/env bash
# Tries a wheel in an empty environment, outside the clone: tests/release.sh dist/fairseq_admin-0.3.0-py3-none-any.whl
# First the wheel alone, for PyTorch; then with fairseq, where every command runs once on a text that is made here.
# PYTHON: what the environment is made from.
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
step() { printf '\n$ %s\n' "$*"; eval "$*"; }

"${PYTHON:-python3}" -m venv env
export PATH="$folder/env/bin:$PATH" PYTHONPATH=
export OMP_NUM_THREADS=1  # a model this small is slower on two
step pip install -q "'${TORCH:-torch==2.13.0}'" "'$wheel'"

python - <<'PYTHON'
import importlib.util

import torch
from torch import nn

import fairseq_admin.pytorch as admin

assert importlib.util.find_spec("fairseq") is None
torch.manual_seed(1)
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0), 6, enable_nested_tensor=False)
x = torch.randn(5, 3, 16)
stock = model(x)
admin.attach(model, x)
scaled = model(x)
assert not torch.allclose(scaled, stock, atol=1e-2)
admin.fold(model, x)
assert torch.allclose(model(x), scaled, atol=1e-4)
print("attached and folded without fairseq")
PYTHON
printf '\n$ fairseq-admin omega model.pt\n'
status=0
message=$(fairseq-admin omega model.pt 2>&1) || status=$?
test $status = 2
grep -F "'fairseq-admin[fairseq]'" <<< "$message"

# fairseq-fixed has no wheel and builds against torch, which a build environment of its own would fetch again.
step pip install -q setuptools wheel cython numpy
step pip install -q --no-build-isolation "'$wheel[fairseq,export,report]'"

# Numbers in words, German to English: 400 lines to learn from, 40 to look at.
python - <<'PYTHON'
import random

ONES = dict(zip("eins zwei drei vier fünf sechs sieben acht neun".split(), "one two three four five six seven eight nine".split()))
random.seed(1)
for name, lines in (("train", 400), ("valid", 40), ("test", 40)):
    with open(f"{name}.de", "w") as german, open(f"{name}.en", "w") as english:
        for _ in range(lines):
            words = random.choices(list(ONES), k=random.randint(3, 8))
            german.write(" ".join(words) + "\n")
            english.write(" ".join(ONES[word] for word in words) + "\n")
PYTHON

step fairseq-preprocess -s de -t en --trainpref train --validpref valid --testpref test --destdir bin \
  --joined-dictionary ">" preprocess.log "2>&1"
mkdir run
step fairseq-train bin --user-dir '"$(fairseq-admin path)"' --arch transformer_admin_tiny --share-all-embeddings \
  --optimizer adam --lr 0.003 --lr-scheduler inverse_sqrt --warmup-updates 100 --max-tokens 800 --max-epoch 60 \
  --keep-last-epochs 3 --seed 1 --cpu --num-workers 0 --log-format simple --save-dir run ">" run/train.log "2>&1"
grep 'Admin: profiled' run/train.log
step fairseq-hydra-train --cfg job --package model model=transformer_admin_tiny "2>/dev/null |" head -2
step fairseq-admin omega run/checkpoint_best.pt "|" head -3
step fairseq-admin average run --last 3 -o average.pt
step fairseq-admin fold average.pt --data bin -o folded.pt
step fairseq-generate bin --path folded.pt --cpu "2>/dev/null |" grep -c ^H-
step echo drei zwei eins "|" fairseq-admin translate folded.pt --data bin --tokenised
step fairseq-admin export folded.pt --to ctranslate2 --data bin -o engine
step fairseq-admin analyze omega average.pt -o omega "|" head -3
step fairseq-admin report run -o report.html
step fairseq-admin --version
