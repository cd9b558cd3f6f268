"""The attention of a model, from the config.json of its checkpoint as Hugging Face's transformers writes it.

Layers with the same attention are one kind: "full" ones see all keys up to the query's, "sliding" ones the last so many
of them.  Which layers slide is what transformers makes of the file: `layer_types` where it is there; else all with a
`sliding_window`, but those of a `sliding_window_pattern` that are not every so manyth (of the models in PATTERNS also
where the file does not say it), those from `max_window_layers` on, and none without `use_sliding_window` (Qwen).

    model = load_model("config.json")
    model.case(n=8192, batch=4, phase="decode").layers      # problems, and how many layers have each

What iosim has no program for is refused, with the file and the field.
"""

from __future__ import annotations

import json
import os
import stat
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iosim.dtypes import DATA, dtype
from iosim.errors import InputError, nearest
from iosim.problem import MAX_D, MAX_HEADS, MAX_N, Attention, require_int

PHASES = ("prefill", "decode", "training")
KINDS = ("full", "sliding")
ALL = "all"

# Spellings of a field, the usual one first.
HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads")
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "kv_n_heads", "multi_query_group_num")
HEAD_DIM = ("head_dim", "kv_channels")
HIDDEN = ("hidden_size", "n_embd", "n_embed", "d_model", "dim")
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
PATTERN = ("sliding_window_pattern", "_sliding_window_pattern")
DTYPE = ("torch_dtype", "dtype")

NESTED = ("text_config", "llm_config", "language_config")  # where a model of more than text has its language model's
PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}  # every so manyth layer is full, by transformers
HEAD_DIMS = {"gemma": 256, "gemma2": 256, "gemma3_text": 256, "qwen3": 128}  # of models without head_dim, by the same
TYPES = {"full_attention": "full", "attention": "full", "sliding_attention": "sliding"}
ENCODERS = ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "electra", "albert", "deit", "vit")

# Fields of attention that iosim has no program for.
FOREIGN = {
    "attn_type_list": "linear attention",
    "linear_attn_config": "linear attention",
    "linear_num_key_heads": "linear attention",
    "ssm_cfg": "state-space layers",
    "state_size": "state-space layers",
    "mamba_d_state": "state-space layers",
    "attn_layer_period": "state-space layers",
    "hybrid_override_pattern": "state-space layers",
    "layers_block_type": "layers other than attention",
    "attention_chunk_size": "chunked attention",
    "cross_attention_layers": "cross-attention layers",
    "attention_types": "attention of several kinds by another rule",
    "hybrid_layer_pattern": "attention of several kinds by another rule",
    "global_attn_every_n_layers": "attention of several kinds by another rule",
    "attention_window": "attention of several kinds by another rule",
    "blocksparse_block_size": "block-sparse attention",
    "num_key_value_heads_per_layer": "heads that differ from layer to layer",
    "block_configs": "heads that differ from layer to layer",
}
# Those of which layer_types, where it is there, says the layers.
TYPED = {"linear_num_key_heads", "linear_attn_config", "layers_block_type", "attention_chunk_size", "mamba_d_state"}

# What a kernel of such a model does to scores besides, and iosim's programs do not.
BESIDE = {"attn_logit_softcapping": "soft-capped scores", "alibi": "ALiBi biases"}

_MAX_FILE_BYTES = 2**20
_MAX_LAYERS = 10_000
_SHOWN = 60  # characters of a value that an error repeats


@dataclass(frozen=True, slots=True)
class Layers:
    """So many layers of a model with the same attention; `kind` is "full" or "sliding"."""

    kind: str
    count: int
    problem: Attention


@dataclass(frozen=True, slots=True)
class ModelCase:
    """A model at work: `n` tokens of `batch` sequences in one phase, as one problem a kind of layer.

    `hidden_nothing` sliding layers are among the full ones, as no key is outside their window at this n.
    """

    model: Model
    phase: str
    n: int
    batch: int
    layers: tuple[Layers, ...]
    hidden_nothing: int = 0

    @property
    def computes(self) -> str:
        """The pass that the phase takes."""
        return "training" if self.phase == "training" else "forward"

    @property
    def count(self) -> int:
        """Layers of all kinds that are asked for."""
        return sum(part.count for part in self.layers)

    @property
    def not_modelled(self) -> tuple[str, ...]:
        """What the model's kernels do to scores and the problems do not say, as --softcap and --alibi make them."""
        problem = self.layers[0].problem
        said = {"soft-capped scores": problem.softcap is not None, "ALiBi biases": problem.alibi}
        return tuple(words for words in self.model.beside if not said.get(words))

    @property
    def kv_bytes(self) -> int:
        """K and V of all tokens in all these layers: the cache, where nothing is forgotten; or the latent."""
        latent = self.model.latent
        return sum(
            part.count
            * p.batch
            * p.n_k
            * (p.kv_heads * (p.d + p.d_v) if latent is None else latent.cached)
            * dtype(p.dtype).bytes
            for part in self.layers
            for p in (part.problem,)
        )

    def one(self) -> Attention:
        """The problem; raises InputError where kinds of layer have different ones."""
        if len(self.layers) > 1:
            kinds = " and ".join(f"{part.count} {part.kind}" for part in self.layers)
            choices = " or ".join(f"--layers {part.kind}" for part in self.layers)
            raise InputError(f"config: {self.model.origin} has {kinds} layers, and this takes one kind: give {choices}")
        return self.layers[0].problem


@dataclass(frozen=True, slots=True)
class Latent:
    """Sizes of multi-head latent attention: `rank` numbers a token stand for all heads' keys and values.

    A head's query and key have `nope` numbers that come from the latent and `rope` that are rotated and that all heads
    share; its value has `value`.
    """

    rank: int
    nope: int
    rope: int
    value: int

    @property
    def d(self) -> int:
        """The head dimension without absorbed matrices."""
        return self.nope + self.rope

    @property
    def cached(self) -> int:
        """Numbers of a token in the cache: the head dimension of K with absorbed matrices."""
        return self.rank + self.rope


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """The attention of a model.  `name` is its model_type, "" where the file has none.

    `kinds` has the kind of each layer from the first on: "full", "sliding" (with `window` keys), or the file's own word
    for what iosim has no program for.  `dtype` is None where the file names none.  `causal` is False for an encoder.
    `beside` are things that its kernels do to scores and iosim's do not.  With a `latent`, K and V are made of it for a
    prefill, which is plain attention, and decoding reads the latent itself (dataflow mla).
    """

    origin: str
    name: str
    heads: int
    kv_heads: int
    d: int
    d_v: int
    dtype: str | None
    causal: bool
    kinds: tuple[str, ...]
    window: int | None
    beside: tuple[str, ...]
    latent: Latent | None = None

    def case(
        self,
        *,
        n: int,
        batch: int = 1,
        phase: str = "prefill",
        layers: str = ALL,
        n_k: int | None = None,
        window: int | None = None,
        **given: Any,
    ) -> ModelCase:
        """The problems of its layers.

        prefill: `n` queries and keys, causal (of an encoder not); `n_k` more keys than queries have a prefix.  decode:
        one query a sequence, which sees `n` keys.  training: as prefill without a prefix, with the log-sum-exp.
        `layers` is "full", "sliding" or "all"; `window` replaces that of the sliding ones; `given` are other fields of
        Attention (dtype, accumulator, lse).  Raises InputError for what is out of range or contradicts the model.
        """
        if phase not in PHASES:
            raise InputError(f"phase: {phase!r} is not one of {', '.join(PHASES)}{nearest(str(phase), PHASES)}")
        n = require_int("n_q", n, 1, MAX_N)
        self._require(phase, n, n_k, window)
        shape = (1, n) if phase == "decode" else (n, n if n_k is None else n_k)
        given = {name: value for name, value in given.items() if value is not None}
        if phase == "training":
            given.setdefault("lse", True)
        if self.dtype is not None:
            given.setdefault("dtype", self.dtype)
        sizes = {"batch": batch, "heads": self.heads, "kv_heads": self.kv_heads, "d": self.d, "d_v": self.d_v}
        if self.latent is not None and phase == "decode":
            sizes |= {"kv_heads": 1, "d": self.latent.cached, "d_v": self.latent.rank}
        given |= {"n_q": shape[0], "n_k": shape[1], **sizes, "causal": self.causal and phase != "decode"}
        made: dict[Attention, Layers] = {}
        hidden_nothing = 0
        for kind, count in self._wanted(layers).items():
            width = (self.window if window is None else window) if kind == "sliding" else None
            if width is not None and width >= shape[1]:
                width, hidden_nothing = None, count
            problem = Attention(**given, window=width)
            kind = "full" if width is None else kind
            before = made[problem].count if problem in made else 0
            made[problem] = Layers(kind, before + count, problem)
        return ModelCase(self, phase, n, next(iter(made)).batch, tuple(made.values()), hidden_nothing)

    def _require(self, phase: str, n: int, n_k: int | None, window: int | None) -> None:
        """Raise InputError for what does not go with the phase or the layers."""
        if not self.causal and phase == "decode":
            raise InputError(f"phase: {self.origin} is an encoder ({self.name}), which does not decode")
        if n_k is not None and phase != "prefill":
            of = "decode sees so many keys as --n says" if phase == "decode" else "training has as many keys as queries"
            raise InputError(f"n_k: {of}; only prefill takes more")
        if n_k is not None and n_k < n:
            raise InputError(f"n_k: {n_k} is less than --n {n}; the keys of prefill are a prefix and the queries' own")
        if window is not None and "sliding" not in self.kinds:
            raise InputError(f"window: {self.origin} has no sliding-window layers")

    def _wanted(self, layers: str) -> dict[str, int]:
        """The kinds of layer that are asked for, and how many there are of each; raises InputError."""
        counts = Counter(self.kinds)
        if layers not in (ALL, *KINDS):
            choices = (*KINDS, ALL)
            raise InputError(f"layers: {layers!r} is not one of {', '.join(choices)}{nearest(str(layers), choices)}")
        foreign = [kind for kind in counts if kind not in KINDS]
        if foreign and layers == ALL:
            own = "; --layers full leaves them out" if "full" in counts else ""
            some = f"{counts[foreign[0]]} of {len(self.kinds)} layers are {foreign[0]!r:.{_SHOWN}}"
            raise InputError(f"config: {self.origin}: layer_types: {some}, which iosim has no program for{own}")
        if layers != ALL and layers not in counts:
            have = " and ".join(f"{count} {kind}" for kind, count in counts.items())
            raise InputError(f"layers: {self.origin} has no {layers} layers; it has {have}")
        return {kind: counts[kind] for kind in KINDS if kind in counts and layers in (ALL, kind)}


def load_model(
    source: str | os.PathLike[str] | Mapping[str, Any],
    *,
    heads: int | None = None,
    kv_heads: int | None = None,
    d: int | None = None,
    d_v: int | None = None,
    dtype: str | None = None,
) -> Model:
    """The model of a config.json, of a directory that has one, or of the same as a dict.

    The others are for a file that does not say them (some leave to transformers what is its default; `d` also stands
    above hidden size by heads); one that contradicts the file is refused, but for `dtype`.
    Raises InputError with the file and the field.
    """
    c = _config(source)
    name = c.text("model_type")
    if c.flag("is_encoder_decoder"):
        raise c.error("is_encoder_decoder", "cross-attention between two stacks, which iosim has no case for")
    typed = c.data.get("layer_types") is not None
    for field, words in FOREIGN.items():
        if c.data.get(field) not in (None, False, 0, []) and not (typed and field in TYPED):
            raise c.error(field, f"{words}, which iosim has no program for")
    heads = c.needed(HEADS, "heads", heads, MAX_HEADS)
    if (latent := _latent(c)) is None:
        d = _head_dim(c, heads, name, d)
    elif d in (None, latent.d):
        d = latent.d
    else:
        raise InputError(f"d: {d} was given, and heads of {c.origin} have {latent.nope} + {latent.rope}")
    kinds, window = _layers(c, name)
    bidirectional = name in ENCODERS or c.flag("use_bidirectional_attention")
    if bidirectional and "sliding" in kinds:
        raise c.error("sliding_window", "a window to both sides, which iosim has no program for")
    return Model(
        origin=c.origin,
        name=name,
        heads=heads,
        kv_heads=_kv_heads(c, heads, kv_heads),
        d=d,
        d_v=c.given(("v_head_dim",), "d_v", d_v, MAX_D) or d,
        dtype=_dtype(c) if dtype is None else dtype,
        causal=not bidirectional,
        kinds=kinds,
        window=window,
        latent=latent,
        beside=tuple(words for field, words in BESIDE.items() if c.data.get(field)),
    )


def model_problem(config: str | os.PathLike[str] | Mapping[str, Any] | Model, **asked: Any) -> Attention:
    """The problem of a model whose layers (or those that `layers` names) are all alike: see `Model.case`.

    Raises InputError where they are not.
    """
    model = config if isinstance(config, Model) else load_model(config)
    return model.case(**asked).one()


# ---------------------------------------------------------------- what the file says


@dataclass(frozen=True, slots=True)
class _Config:
    """The table of a file that describes attention; `path` is how its fields are said, `outer` the whole file."""

    origin: str
    data: Mapping[str, Any]
    path: str
    outer: Mapping[str, Any]

    def error(self, field: str, words: str) -> InputError:
        return InputError(f"config: {self.origin}: {self.path}{field}: {words}")

    def find(self, names: Iterable[str]) -> tuple[str, Any] | None:
        """The field of the first name that is there and not null; raises InputError where two disagree."""
        found = [(name, self.data[name]) for name in names if self.data.get(name) is not None]
        for name, value in found[1:]:
            if value != found[0][1]:
                raise self.error(name, f"{_show(value)} contradicts {found[0][0]}, which is {_show(found[0][1])}")
        return found[0] if found else None

    def whole(self, names: Iterable[str], most: int) -> int | None:
        """A whole number from 1 on, or None."""
        found = self.find(names)
        if found is None:
            return None
        name, value = found
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"{_show(value)} is not a whole number")
        if not 1 <= value <= most:
            raise self.error(name, f"{_show(value)} is out of range; 1 to {most} is allowed")
        return value

    def given(self, names: Iterable[str], field: str, value: int | None, most: int) -> int | None:
        """A whole number of the file, or the `value` of a `field` of the problem where the file has none.

        Raises InputError where both are there and differ.
        """
        own = self.whole(names, most)
        if value is None or own is None:
            return own if value is None else require_int(field, value, 1, most)
        if value != own:
            name, _ = self.find(names) or ("", None)
            raise InputError(f"{field}: {value} was given, and {self.origin} has {self.path}{name} {own}")
        return own

    def needed(self, names: tuple[str, ...], field: str, value: int | None, most: int) -> int:
        """As `given`, and raises InputError where neither has it."""
        found = self.given(names, field, value, most)
        if found is None:
            raise self.missing(names, f"; --{field} gives it")
        return found

    def missing(self, names: tuple[str, ...], more: str = "") -> InputError:
        """That none of the spellings of a field is there."""
        known = {*HEADS, *KV_HEADS, *HEAD_DIM, *HIDDEN, *LAYERS}
        there = [str(name) for name, value in self.data.items() if value is not None and name not in known]
        hint = next((hint for name in names if (hint := nearest(name, there))), "").replace("did you mean", "is it")
        return self.error(names[0], f"missing (or {', '.join(names[1:])}){hint}{more}")

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.data.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{_show(value)} is not true or false")
        return value

    def text(self, name: str) -> str:
        value = self.data.get(name) or ""
        if not isinstance(value, str):
            raise self.error(name, f"{_show(value)} is not a text")
        return value


def _config(source: str | os.PathLike[str] | Mapping[str, Any]) -> _Config:
    """The table that has the heads: the whole file, or one of those that are nested in it."""
    if isinstance(source, Mapping):
        origin, data = "config", source
    else:
        origin, data = _read(Path(source))
    for name in NESTED:
        inner = data.get(name)
        if isinstance(inner, Mapping) and not any(data.get(field) is not None for field in HEADS):
            return _Config(origin, inner, f"{name}.", data)
    extra = data.get("attn_config")  # of MPT and DBRX
    if isinstance(extra, Mapping):
        data = {**{name: extra[name] for name in ("kv_n_heads", "alibi") if name in extra}, **data}
    return _Config(origin, data, "", data)


def _read(path: Path) -> tuple[str, Mapping[str, Any]]:
    """A JSON object of bounded size, and the name of its file."""
    try:
        if path.is_dir():
            path = path / "config.json"
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"config: {path}: is not a regular file")
        if status.st_size > _MAX_FILE_BYTES:
            raise InputError(f"config: {path}: {status.st_size} bytes; a config.json has at most {_MAX_FILE_BYTES}")
        data = json.loads(path.read_bytes(), object_pairs_hook=_object, parse_constant=_no_number)
    except OSError as error:
        raise InputError(f"config: {path}: cannot be read: {error.strerror or error}") from None
    except InputError:
        raise
    except (ValueError, RecursionError) as error:  # of JSON, of its encoding, or of a path with a NUL byte
        raise InputError(f"config: {path}: is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise InputError(f"config: {path}: is not a JSON object, but {_show(data)}")
    return str(path), data


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        twice = next(name for name, times in Counter(name for name, _ in pairs).items() if times > 1)
        raise ValueError(f"{_show(twice)} is there twice")
    return made


def _no_number(word: str) -> Any:
    raise ValueError(f"{word} is no number of JSON")


def _show(value: object) -> str:
    text = json.dumps(value, default=repr)
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def _head_dim(c: _Config, heads: int, name: str, given: int | None) -> int:
    """The head dimension: the file's, the `given` one, what models of this name have, or hidden size by heads."""
    if c.find(HEAD_DIM) is not None or (given is not None and name not in HEAD_DIMS):
        return c.needed(HEAD_DIM, "d", given, MAX_D)
    if name in HEAD_DIMS:
        if given not in (None, HEAD_DIMS[name]):
            raise InputError(f"d: {given} was given, and {c.origin} has model_type {name}, which is {HEAD_DIMS[name]}")
        return HEAD_DIMS[name]
    hidden = c.whole(HIDDEN, MAX_D * MAX_HEADS)
    if hidden is None:
        raise c.missing((*HEAD_DIM, *HIDDEN[:2]), "; --d gives it")
    field, _ = c.find(HIDDEN) or ("", None)
    if hidden % heads:
        raise c.error(field, f"{hidden} is not a multiple of the {heads} heads, and there is no head_dim")
    if hidden // heads > MAX_D:
        raise c.error(field, f"{hidden} by {heads} heads is {hidden // heads}; a head dimension is at most {MAX_D}")
    return hidden // heads


def _kv_heads(c: _Config, heads: int, given: int | None) -> int:
    """Key/value heads: as many as heads where the file says nothing; one in Falcon's and StarCoder's `multi_query`."""
    single = c.flag("multi_query") and not c.flag("new_decoder_architecture")
    if single:
        if given not in (None, 1):
            raise InputError(f"kv_heads: {given} was given, and {c.origin} has {c.path}multi_query true, which is 1")
        return 1
    names = [name for name in KV_HEADS if name != "multi_query_group_num" or c.flag("multi_query_attention")]
    found = c.given(names, "kv_heads", given, MAX_HEADS) or heads
    if heads % found:
        name, _ = c.find(names) or ("kv_heads", None)
        raise c.error(name, f"{found} does not divide the {heads} heads")
    return found


def _dtype(c: _Config) -> str | None:
    """The format of the file, where it names one."""
    for data, path in ((c.data, c.path), (c.outer, "")):
        for name in DTYPE:
            value = data.get(name)
            if value in (None, "auto"):
                continue
            try:
                if not isinstance(value, str):
                    raise InputError(f"dtype: {_show(value)} is not a text")
                if (found := dtype(value.removeprefix("torch.")).name) not in DATA:
                    raise InputError(f"{value!r} is not one of {', '.join(DATA)}")
                return found
            except InputError as error:
                words = str(error).removeprefix("dtype: ")
                raise InputError(f"config: {c.origin}: {path}{name}: {words}; --dtype takes another") from None
    return None


def _layers(c: _Config, name: str) -> tuple[tuple[str, ...], int | None]:
    """The kind of each layer, and the window of those that slide."""
    found = c.find(LAYERS)
    if found is None:
        raise c.missing(LAYERS)
    count = c.whole(LAYERS, _MAX_LAYERS) or 0
    kinds = _typed(c, count) if c.data.get("layer_types") is not None else _by_rule(c, name, count)
    if "sliding" not in kinds:
        return kinds, None
    window = c.whole(("sliding_window",), MAX_N)
    if window is None:
        raise c.error("sliding_window", "missing, and layer_types has sliding_attention")
    return kinds, window


def _typed(c: _Config, count: int) -> tuple[str, ...]:
    """The kinds of layer that the file lists."""
    types = c.data["layer_types"]
    if not isinstance(types, list) or not all(isinstance(kind, str) for kind in types):
        raise c.error("layer_types", f"{_show(types)} is not a list of texts")
    if len(types) != count:
        raise c.error("layer_types", f"{len(types)} entries, and there are {count} layers")
    return tuple(TYPES.get(str(kind), str(kind)) for kind in types)


def _by_rule(c: _Config, name: str, count: int) -> tuple[str, ...]:
    """The kinds of layer that transformers makes of the other fields."""
    full = ("full",) * count
    qwen = name.startswith(("qwen2", "qwen3"))
    if c.data.get("sliding_window") is None or not c.flag("use_sliding_window", not qwen):
        return full
    first = c.data.get("max_window_layers")
    if first is not None or qwen:
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise c.error("max_window_layers", "missing" if first is None else f"{_show(first)} is not a whole number")
        return tuple("full" if layer < first else "sliding" for layer in range(count))
    found = c.find(PATTERN)
    field, pattern = found or ("", PATTERNS.get(name))
    if pattern is None:
        return ("sliding",) * count
    if isinstance(pattern, str) and pattern and set(pattern) <= {"L", "G"}:  # EXAONE: the last layer is global
        slides = [pattern[layer % len(pattern)] == "L" and layer < count - 1 for layer in range(count)]
    elif isinstance(pattern, int) and not isinstance(pattern, bool) and pattern >= 1:
        slides = [(layer + 1) % pattern != 0 for layer in range(count)]
    else:
        raise c.error(field, f"{_show(pattern)} is neither a whole number from 1 on nor letters L and G")
    return tuple("sliding" if each else "full" for each in slides)


def _latent(c: _Config) -> Latent | None:
    """The sizes of multi-head latent attention, where the file has them."""
    rank = c.whole(("kv_lora_rank",), MAX_D)
    if rank is None:
        return None
    sizes = [c.whole((name,), MAX_D) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if None in sizes:
        raise c.error(
            "kv_lora_rank", "latent attention has qk_nope_head_dim, qk_rope_head_dim and v_head_dim beside it"
        )
    return Latent(rank, *(int(size or 0) for size in sizes))
