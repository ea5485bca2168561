"""The `onchip` command: info, explain, bench, lab, generate. Needs the cli extra (typer).

Every command takes `--json`. Exit status: 0 fine, 1 a check failed, 2 wrong arguments.
"""

from __future__ import annotations

import enum
import functools
import json
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from onchip import __version__, dispatch, info, validate
from onchip.analysis.hardware import Hardware
from onchip.problem import Layout, Mask, Op, Problem, device_arch

app = typer.Typer(
    name="onchip",
    help="Exact attention whose intermediates never leave the chip.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
#: Of a call that is explained: a list with an entry for each is made.
_MOST_SEQUENCES = 1 << 20
_ENGINE_PACKAGES = ("gguf", "numpy", "safetensors", "tokenizers")
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Causal = Annotated[bool, typer.Option(help="A query sees no later key (bottom-right aligned).")]


class Dtype(str, enum.Enum):
    """Dtypes of q, k and v."""

    FLOAT16 = "float16"
    BFLOAT16 = "bfloat16"
    FLOAT32 = "float32"
    FLOAT64 = "float64"


class Mistake(str, enum.Enum):
    """Classic mistakes that the lab can plant."""

    ALPHA = "alpha"
    SCALE = "scale"
    CAUSAL = "causal"


def main(arguments: list[str]) -> int:
    """Runs one command.

    Args:
        arguments: the command line without the program's name.

    Returns:
        The exit status.
    """
    try:
        app(arguments, prog_name="onchip")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def _clean_errors(command: Callable) -> Callable:
    """Turns errors meant for users into a message and exit status 2."""

    @functools.wraps(command)
    def run(*args, **kwargs):
        try:
            return command(*args, **kwargs)
        except (ValueError, TypeError, NotImplementedError, OSError) as error:
            message = str(error)
        except ModuleNotFoundError as error:
            if error.name not in _ENGINE_PACKAGES:
                raise
            message = (
                f"{error.name} is not installed. Run: pip install '.[engine]' in onchip's folder"
            )
        typer.echo(f"onchip: {message}", err=True)
        raise typer.Exit(2)

    return run


def _print(result: Any, as_json: bool) -> None:
    """Prints a result that has `to_dict()` and `__str__`."""
    typer.echo(json.dumps(result.to_dict(), indent=2) if as_json else str(result))


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_show_version, help="And exit.")
    ] = False,
) -> None:
    pass


@app.command("info")
def _info(as_json: AsJson = False) -> None:
    """Shows versions, devices, and which kernels run here or why not."""
    info.main(["--json"] if as_json else [])


@app.command("explain")
@_clean_errors
def _explain(
    batch: Annotated[int, typer.Option(help="B, sequences.")] = 1,
    seqlen: Annotated[int, typer.Option(help="S_q, and S_k unless given.")] = 4096,
    seqlen_k: Annotated[int | None, typer.Option(help="S_k, keys of a sequence.")] = None,
    heads: Annotated[int, typer.Option(help="H, query heads.")] = 32,
    kv_heads: Annotated[int | None, typer.Option(help="H_kv; H unless given.")] = None,
    head_dim: Annotated[int, typer.Option(help="D, features of a head.")] = 128,
    causal: Causal = False,
    window: Annotated[
        tuple[int, int], typer.Option(metavar="L R", help="Keys seen to each side; -1 for all.")
    ] = (-1, -1),
    softcap: Annotated[float, typer.Option(help="Cap on the scores; 0 for none.")] = 0.0,
    dtype: Annotated[Dtype, typer.Option(help="Of q, k and v.")] = Dtype.BFLOAT16,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cpu, or cuda with --gpu, unless given.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="E.g. sm_90; this machine's GPU's.")] = None,
    gpu: Annotated[str | None, typer.Option(help="Predict for it, e.g. H200, on cuda.")] = None,
    kernel: Annotated[str | None, typer.Option(help="Force this kernel.")] = None,
    backward: Annotated[bool, typer.Option("--backward", help="Explain it as well.")] = False,
    as_json: AsJson = False,
) -> None:
    """Shows which kernel would run a call, why the others would not, and what it costs."""
    hardware = _hardware(gpu, arch)
    if device is None:
        device = "cuda" if hardware else "cpu"
    if hardware:
        if _device(device).type != "cuda":
            validate.reject("--device", device, "cuda beside --gpu", "Leave one of the two out.")
        arch = hardware.arch
    if arch is not None and _device(device).type == "cpu":
        fix = "Add --device cuda, or leave --arch out."
        validate.reject("--arch", arch, "nothing with --device cpu: it names a GPU", fix)
    if arch is not None and not re.fullmatch(r"sm_\d+|gfx[0-9a-f]+", arch):
        validate.reject("--arch", repr(arch), "sm_ or gfx and a number", "E.g. sm_90 or gfx942.")
    problem = dense_problem(
        batch=batch,
        seqlen_q=seqlen,
        seqlen_k=seqlen if seqlen_k is None else seqlen_k,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        mask=_mask(causal, window),
        softcap=softcap,
        dtype=getattr(torch, dtype.value),
        device=device,
        arch=arch,
    )
    if kernel is not None and kernel not in dispatch.kernel_names():
        allowed = ", ".join(dispatch.kernel_names())
        validate.reject("--kernel", kernel, allowed, "Leave it out to let onchip choose.")
    training = replace(problem, op=Op.BACKWARD) if backward else None
    _print(dispatch.explain(problem, kernel, training, hardware), as_json)


def _hardware(gpu: str | None, arch: str | None) -> Hardware | None:
    """The named GPU, which an architecture given beside it must fit."""
    hardware = None if gpu is None else Hardware.named(gpu)
    if hardware and arch not in (None, hardware.arch):
        fix = "Leave it out beside --gpu."
        validate.reject("--arch", arch, f"{hardware.arch}, which {hardware.name} is", fix)
    return hardware


def _mask(causal: bool, window: tuple[int, int]) -> Mask:
    validate.window(window)
    return Mask.of(causal, window)


def dense_problem(
    *, device: str, arch: str | None, softcap: float, mask: Mask, dtype: torch.dtype, **sizes: Any
) -> Problem:
    """The forward Problem of a dense call, from sizes alone.

    Args:
        device: a torch device type.
        arch: the GPU's architecture; None for this machine's GPU.
        softcap: 0 for none.
        mask: which keys a query sees.
        dtype: of q, k and v.
        sizes: batch, seqlen_q, seqlen_k, num_heads, num_kv_heads, head_dim.

    Raises:
        ValueError: if a size or option is out of its range.
    """
    options = {"seqlen_q": "seqlen", "num_heads": "heads", "num_kv_heads": "kv_heads"}
    may_be_zero = ("batch", "seqlen_q", "seqlen_k")
    for name, size in sizes.items():
        option = "--" + options.get(name, name).replace("_", "-")
        validate.count(option, size, 0 if name in may_be_zero else 1)
    if sizes["batch"] > _MOST_SEQUENCES:
        fix = "Costs are counted sequence by sequence."
        validate.reject("--batch", sizes["batch"], f"up to {_MOST_SEQUENCES}", fix)
    if sizes["num_heads"] % sizes["num_kv_heads"]:
        fix = "Each key/value head serves H / H_kv query heads."
        allowed = f"a divisor of --heads {sizes['num_heads']}"
        validate.reject("--kv-heads", sizes["num_kv_heads"], allowed, fix)
    validate.real("--softcap", softcap, 0.0)
    place = _device(device)
    return Problem(
        op=Op.FORWARD,
        device=place.type,
        arch=_arch(place) if arch is None else arch,
        dtype=dtype,
        kv_dtype=dtype,
        layout_q=Layout.DENSE,
        layout_k=Layout.DENSE,
        tokens_q=sizes["batch"] * sizes["seqlen_q"],
        head_dim_v=sizes["head_dim"],
        mask=mask,
        scale=sizes["head_dim"] ** -0.5,
        softcap=softcap,
        **sizes,
    )


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except RuntimeError:
        return validate.reject("--device", name, "cpu or cuda", "It need not be in this machine.")


def _arch(device: torch.device) -> str:
    return device_arch(device) if torch.cuda.is_available() else ""


@app.command(
    "bench",
    add_help_option=False,
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)
def _bench(context: typer.Context) -> None:
    """Times onchip beside three-step attention and its peers, or reads the GPU's counters."""
    from onchip.bench import compare

    raise typer.Exit(compare.main(context.args))


@app.command("lab")
@_clean_errors
def _lab(
    context: typer.Context,
    length: Annotated[int, typer.Option(help="Queries and keys.")] = 7,
    block: Annotated[int, typer.Option(help="Keys of a tile.")] = 3,
    head_dim: Annotated[int, typer.Option(help="D, features of the head.")] = 4,
    causal: Causal = False,
    seed: Annotated[int, typer.Option(help="Of the random inputs.")] = 0,
    mistake: Annotated[
        Mistake | None, typer.Option("--break", help="Plant a mistake (causal implies --causal).")
    ] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the interactive page (HTML) there.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Checks tiled attention and its gradients against the dense formula, step by step."""
    if page is not None:
        _refuse_beside_page(context)
        _write_page(page, as_json)
        return
    for option, value in (("--length", length), ("--block", block), ("--head-dim", head_dim)):
        validate.count(option, value, 1)
    from onchip.lab.numeric import run_lab

    planted = None if mistake is None else mistake.value
    causal = causal or mistake is Mistake.CAUSAL
    report = run_lab(length, block, head_dim, causal, seed, planted)
    _print(report, as_json)
    if not report.passed:
        raise typer.Exit(1)


def _refuse_beside_page(context: typer.Context) -> None:
    """Refuses options of the checks, of which the page has controls of its own."""
    for param in context.command.params:
        assert param.name is not None
        source = context.get_parameter_source(param.name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and param.name not in ("page", "as_json"):
            fix = "Set it in the page, or leave --page out to run the checks."
            validate.reject(param.opts[0], "it beside --page", "--json alone", fix)


def _write_page(path: Path, as_json: bool) -> None:
    from onchip.lab.page import write

    written = write(path).resolve()
    told = {"page": str(written)}
    typer.echo(json.dumps(told, indent=2) if as_json else f"{written}: open it in a browser")


def _loading() -> Callable[[int, int], None]:
    """A bar on stderr while a model loads; stdout carries the answer alone."""
    from onchip.engine.demo import ProgressBar

    bar = None

    def show(done: int, total: int) -> None:
        nonlocal bar
        if bar is None:  # not before: an error may come first
            bar = ProgressBar(sys.stderr)
        bar(done, total)
        if done == total:
            typer.echo(err=True)

    return show


@app.command("generate")
@_clean_errors
def _generate(
    model: Annotated[str, typer.Argument(help="A GGUF file or a Hugging Face folder.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue, or to answer.")],
    max_tokens: Annotated[int, typer.Option(help="New tokens at most.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Draw from the likeliest tokens only.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Of the draws.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat format.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continues a prompt with a language model, token by token."""
    from onchip.engine.llm import LLM, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    llm = LLM(model, progress=_loading())
    messages = [{"role": "user", "content": prompt}]
    stream = llm.stream_chat(messages, params) if chat else llm.stream(prompt, params)
    tokens = []
    for token in stream:
        tokens.append(token)
        if not as_json:
            typer.echo(token.text, nl=False)
    if not as_json:
        typer.echo()
        return
    report = {
        "model": model,
        "prompt": prompt,
        "text": "".join(token.text for token in tokens),
        "token_ids": [token.token_id for token in tokens],
        "finish_reason": tokens[-1].finish_reason,
        "stats": asdict(llm.stats),
    }
    typer.echo(json.dumps(report, indent=2))
