"""`iosim report latent`: latent attention with absorbed matrices and without."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from iosim.cli.group import command
from iosim.cli.sections import lengths_of, section_options
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.models import Latent
    from iosim.study.run import Note

SIZES = ("rank", "rope", "nope", "d_v", "heads")


@command()
@click.option("--config", metavar="FILE.json", help="A model's config.json, which gives the sizes and the heads.")
@click.option("--heads", "-H", type=click.IntRange(1, 2**16), default=128, show_default=True, help="Query heads.")
@click.option("--rank", type=click.IntRange(1, 1024), default=512, show_default=True, help="Numbers of the latent.")
@click.option("--rope", type=click.IntRange(1, 1024), default=64, show_default=True, help="Rotated ones beside it.")
@click.option("--nope", type=click.IntRange(1, 1024), default=128, show_default=True, help="Others of a head's key.")
@click.option("--d-v", type=click.IntRange(1, 1024), default=128, show_default=True, help="Numbers of a head's value.")
@click.option(
    "--n-k", metavar="N,...", default="1024,4096,16384", show_default=True, callback=lengths_of,
    help="Tokens that a decoding step sees.",
)  # fmt: skip
@click.option("--n", "-n", type=click.IntRange(2, 2**24), default=2048, show_default=True, help="Tokens of a prefill.")
@click.option("--batch", "-b", type=click.IntRange(1, 2**16), default=1, show_default=True, help="Sequences.")
@click.option("--dtype", default="bf16", show_default=True, help="fp16 or bf16 data.")
@click.option("--hw", default="mp31", show_default=True, help="A machine by name, or a .toml file.")
@section_options
def latent(n_k: tuple[int, ...], n: int, batch: int, dtype: str, hw: str, **options: Any) -> Callable[[Note], Section]:
    """Latent attention (MLA) with absorbed matrices and without.

    What prefill and decoding read of keys and values, and how long they take, with the latent in the cache or keys and
    values of every head; and the products that make one of the other.  Sizes are those of DeepSeek-V2 and V3.

    \b
    Example: iosim report latent --hw h200-sxm
             iosim report latent -H 16 --n-k 4096 --batch 8
    """
    if n_k[0] < 1:
        raise InputError("--n-k: 0 is out of range; it is at least 1")
    sizes, heads = _sizes(options)
    request = {**{name: options[name] for name in SIZES}, "config": options["config"], "n_k": list(n_k), "n": n,
               "batch": batch, "dtype": dtype, "hw": hw}  # fmt: skip

    def make(note: Note) -> Section:
        from iosim.report.latent import section
        from iosim.study.latent import latent as study
        from iosim.study.run import machine_called

        return section(study(sizes, heads, batch, n_k, n, machine_called(hw), dtype, note), request)

    return make


def _sizes(options: dict[str, Any]) -> tuple[Latent, int]:
    """The latent's sizes and the heads, of the options or of a model's file."""
    from iosim.study.models import Latent, load_model

    if options["config"] is None:
        return Latent(options["rank"], options["nope"], options["rope"], options["d_v"]), options["heads"]
    context = click.get_current_context()
    for name in SIZES:
        if context.get_parameter_source(name) is not ParameterSource.DEFAULT:
            raise InputError(f"--{name.replace('_', '-')} and --config: give one of them")
    model = load_model(options["config"])
    if model.latent is None:
        raise InputError(f"--config: {model.origin} has no latent attention (kv_lora_rank)")
    return model.latent, model.heads
